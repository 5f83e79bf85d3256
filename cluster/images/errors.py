"""The errors of processing images.

ImageError
|-- ImageRefused        the image itself is at fault: it is broken or too large
`-- ImagesUnavailable   this ingress cannot process images now
"""

from __future__ import annotations


class ImageError(Exception):
    """The root of the errors of images."""


class ImageRefused(ImageError):
    """The image is refused: the client has to send another one. The message says what is allowed."""


class ImagesUnavailable(ImageError):
    """Too many images wait, or the process that prepares them does not start."""
