"""What can go wrong with an image.

ImageError
|-- ImageRefused        the image itself is at fault: it is no image, or too much of one
`-- ImagesUnavailable   this ingress cannot work on any now
"""

from __future__ import annotations


class ImageError(Exception):
    """The root of the errors of images."""


class ImageRefused(ImageError):
    """Whoever sent it has to send another one; the words say what is allowed."""


class ImagesUnavailable(ImageError):
    """Too many images wait, or the process that works on them does not start."""
