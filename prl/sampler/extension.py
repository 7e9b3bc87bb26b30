"""What prl adds to vLLM's worker: each step of an update, as one call."""

import traceback
from typing import Any

from prl.sampler.engine import InPlaceEngine
from prl.sampler.orders import LoadInfo, StoreInfo


class WorkerExtension:
    """Mixed into vLLM's worker."""

    weight_transfer_engine: InPlaceEngine

    def prl_receive(self, update_info: dict[str, Any]) -> None:
        """Arm the receiver; a version that was staged or is on its way and was never committed is given up."""
        if not self._weight_update_active:  # type: ignore[attr-defined]  # the worker's own flag
            self.start_weight_update()  # type: ignore[attr-defined]
        self.update_weights(update_info)  # type: ignore[attr-defined]

    def prl_load(self, info: dict[str, Any]) -> None:
        """Arm the reading of a version from files, with the same effect."""
        if not self._weight_update_active:  # type: ignore[attr-defined]
            self.start_weight_update()  # type: ignore[attr-defined]
        self.weight_transfer_engine.load(LoadInfo(**info))

    def prl_store(self, info: dict[str, Any]) -> None:
        """Arm the writing of the live version to files."""
        self.weight_transfer_engine.store(StoreInfo(**info))

    def prl_staged(self) -> dict[str, str | bool]:
        staged = self.weight_transfer_engine.staged()
        if staged is None:
            return {}
        return {"version": str(staged.version), "digest": str(staged.digest), "share": staged.share}

    def prl_commit(self) -> dict[str, str | bool]:
        """Copy, then verify the live parameters: {"digest": ..., "share": ...} or {"error": ...}."""
        try:
            self.finish_weight_update()  # type: ignore[attr-defined]
            value, share = self.weight_transfer_engine.verify_live()
            return {"digest": str(value), "share": share}
        except Exception as error:  # whatever vLLM's loader failed at, nothing must be sampled from what it left
            traceback.print_exc()
            return {"error": f"{type(error).__name__}: {error}"}
