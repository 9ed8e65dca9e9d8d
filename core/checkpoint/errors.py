"""What can go wrong with a checkpoint, by what the caller should do about it. Pure."""


class CheckpointError(Exception):
    """The input is wrong (another shape, another program, a newer format): refuse, exit code 2."""


class MissingCheckpoint(CheckpointError):
    """Nothing has been saved there yet: start fresh, or refuse if one was asked for."""


class BrokenCheckpoint(CheckpointError):
    """This one is damaged (torn, truncated, flipped, incomplete): the previous one may be good."""


class MisreadCheckpoint(BrokenCheckpoint):
    """Reading failed, or gave other bytes than were written: a second try may do better."""


class SaveError(CheckpointError):
    """A save failed on some rank; raised on every rank. Older checkpoints are as they were."""
