"""The former place of requests, which programs written by the documents of raypd 0.1 import."""

from actors.core.requests.request import EngineCoreRequest as EngineCoreRequest
from actors.core.requests.request import Request as Request
