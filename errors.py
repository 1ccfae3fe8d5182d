"""The mistakes that a user can mend, each with the exit code that tells a launcher what happened."""


class PaddockError(Exception):
    """One sentence for the user: what was got, what was expected, what to change."""

    exit_code = 1
    told_by_main = False  # on ranks other than 0, when rank 0 raised it for all


class SettingsError(PaddockError):
    """A setting is unknown, malformed, or cannot go with the others."""

    exit_code = 2


class DataError(PaddockError):
    """A data, evaluation or tokenizer file cannot be used."""

    exit_code = 3


class NonFiniteError(PaddockError):
    """A loss or gradient stopped being a number."""

    exit_code = 4


class CheckpointError(PaddockError):
    """A checkpoint cannot be written, found, verified or used."""

    exit_code = 5
