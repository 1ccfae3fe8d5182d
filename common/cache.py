"""Where what is computed of data once is kept, and the lock that lets one process at a time write it."""

from pathlib import Path
from typing import NamedTuple, Optional

from common.errors import DataError, SettingsError
from common.files import why_not_writable


class Cache(NamedTuple):
    """Where what is computed of data is kept: in `chosen`; without it beside the data, or else in `otherwise`."""

    chosen: Optional[Path] = None  # CACHE_DIR
    otherwise: Optional[Path] = None

    def places(self, data: Path, fingerprint: str) -> list[Path]:
        """Where it may lie, for data in a folder, the likeliest first."""
        name = f"data-{fingerprint[:16]}"
        if self.chosen:
            return [self.chosen / name]
        return [data, *([self.otherwise / name] if self.otherwise else [])]

    def place_to_write(self, data: Path, fingerprint: str, name: str = "") -> tuple[Path, str]:
        """Where it can be written, and why not beside the data, in words; empty = it is there, or the user chose.

        Args:
            name: of the folder there that it will be, which may exist and belong to somebody else.
        Raises:
            DataError: nowhere.
        """
        refusals = []
        for place in self.places(data, fingerprint):
            refused = [f"{folder} cannot be written: {error.strerror}" for folder in (place, place / name)
                       if (error := why_not_writable(folder))]
            if not refused:
                return place, "; ".join(refusals)
            refusals.append(refused[0])
        raise DataError(f"{'; '.join(refusals)}; set CACHE_DIR to a folder that can")

    def check(self) -> None:
        """See that what the user chose can be written. Raises SettingsError where it cannot."""
        if self.chosen and (error := why_not_writable(self.chosen)):
            raise SettingsError(f"CACHE_DIR={self.chosen} cannot be written to: {error.strerror}; set it to a folder "
                                "that can, or leave it away")
