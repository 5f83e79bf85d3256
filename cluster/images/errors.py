"""The errors that an image can end in.

ImageError
|-- ImageRefused        the image itself is at fault: it is no image, or too much of one
`-- ImagesUnavailable   this ingress cannot work on any now
"""

from __future__ import annotations


class ImageError(Exception):
    """The root of the errors of images."""


class ImageRefused(ImageError):
    """The image cannot be taken: the client has to send another one. The message says what is allowed."""


class ImagesUnavailable(ImageError):
    """Too many images wait, or the process that works on them does not start."""
