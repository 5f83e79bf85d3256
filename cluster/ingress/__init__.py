"""The former place of the generated protobuf code, which is cluster.api.protos now.

Programs that import `cluster.ingress.protos.raypd.v1`, as the documents used to say, get the same modules.
"""

from __future__ import annotations

import importlib
import sys
from typing import Final

_FILES: Final = [
    f".raypd.v1.{name}_{kind}" for name in ("admin", "embed", "generate", "model") for kind in ("pb2", "pb2_grpc")
]

for _module in ("", ".raypd", ".raypd.v1", *_FILES):
    sys.modules[f"{__name__}.protos{_module}"] = importlib.import_module(f"cluster.api.protos{_module}")
