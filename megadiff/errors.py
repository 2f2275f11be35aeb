"""The errors that a user can cause. Each message is one sentence with the values and the remedy."""


class MegadiffError(Exception):
    """Base of every error that is reported as one line instead of a traceback."""


class ConfigError(MegadiffError):
    """A setting is unknown, malformed, or impossible together with another one."""


class PlanError(MegadiffError):
    """A parallel plan or a pipeline partition does not fit the network."""


class CheckpointError(MegadiffError):
    """A checkpoint or an exported file is incomplete, damaged, or belongs to another network."""


class DataError(MegadiffError):
    """A data set is missing, too small, or holds something that cannot be read."""


class LaunchError(MegadiffError):
    """The processes of a run could not be brought together."""
