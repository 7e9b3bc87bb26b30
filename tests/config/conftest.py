from checked import good

__all__ = ["good"]
