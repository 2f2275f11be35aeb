"""A folder with one sub-folder of image files a class."""

from pathlib import Path

from PIL import Image
from torch import Tensor

from megadiff.data.dataset import choose_classes, hash_parts, to_signed_unit
from megadiff.data.pixels import read_square_rgb
from megadiff.errors import DataError

SUFFIXES = frozenset({".png", ".jpg", ".jpeg", ".webp", ".bmp"})


class ImageFolder:
    """The images below `folder/CLASS/`, decoded when they are needed.

    The order is that of the sorted paths, so it is the same on every machine. Hidden files and
    files that are no images (captions, say) are passed over; an image outside SUFFIXES is an error.
    """

    def __init__(self, folder: Path, input_size: int, classes: tuple[str, ...] = ()) -> None:
        """List the files.

        Args:
            folder: holds the class folders.
            input_size: height and width of the samples.
            classes: folder names to use, in the order of their class numbers; all, sorted, if empty.

        Raises:
            DataError: no class folder, a class folder without images, or an unsupported image format.
        """
        folders = sorted(entry.name for entry in folder.iterdir() if entry.is_dir() and entry.name[0] != ".")
        if not folders:
            raise DataError(f"data.path = {folder} has no class folders; put the images into {folder}/CLASS/")
        self.class_names = choose_classes(classes, folders, str(folder))
        self.input_size = input_size
        self.samples = [
            (path, label) for label, name in enumerate(self.class_names) for path in list_images(folder / name)
        ]
        content = ((path.relative_to(folder).as_posix(), path.stat().st_size) for path, _ in self.samples)
        self.fingerprint = hash_parts(("image_folder", input_size, self.class_names, *content))

    @property
    def labels(self) -> list[int]:
        """The class of each picture."""
        return [label for _, label in self.samples]

    def __len__(self) -> int:
        """Return the number of images."""
        return len(self.samples)

    def load(self, index: int) -> tuple[Tensor, int]:
        """Return image `index` as ((3, H, W) float32 in [-1, 1], class); DataError names a bad file."""
        path, label = self.samples[index]
        return to_signed_unit(read_square_rgb(path, self.input_size)), label


def list_images(folder: Path) -> list[Path]:
    """Return the image files below a class folder in the order of their paths, at least one."""
    files = sorted(path for path in folder.rglob("*") if path.is_file() and not path.name.startswith("."))
    supported = ", ".join(sorted(SUFFIXES))
    unsupported = Image.registered_extensions().keys() - SUFFIXES
    for path in files:
        if path.suffix.lower() in unsupported:
            raise DataError(f"{path} has an unsupported format; convert it to one of {supported}")
    images = [path for path in files if path.suffix.lower() in SUFFIXES]
    if not images:
        raise DataError(f"the class folder {folder} has no images ({supported}); add some or remove it")
    return images
