"""The former module of requests, which programs written against raypd 0.1 import."""

from actors.core.requests.request import EngineCoreRequest as EngineCoreRequest
from actors.core.requests.request import Request as Request
