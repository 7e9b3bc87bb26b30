"""Writers and readers of the rollout stream, on the backend that the config names."""

from prl.runfolder.paths import RunFolder
from prl.streams.folder import FolderAppender, FolderSource
from prl.streams.options import StreamsOptions
from prl.streams.reader import RolloutReader
from prl.streams.writer import RolloutWriter


def open_writer(run: RunFolder, writer: str, run_name: str, attempt: int, options: StreamsOptions) -> RolloutWriter:
    """The stream of one writer (an actor); a name of its own for each of those that write at one time."""
    return RolloutWriter(FolderAppender(run, writer), writer, run_name, attempt, options)


def open_reader(run: RunFolder, run_name: str, options: StreamsOptions) -> RolloutReader:
    """The streams of all writers of a run."""
    return RolloutReader(FolderSource(run), run_name)
