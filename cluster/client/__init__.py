"""A client of raypd.v1, for Python programs and for the command line."""

from cluster.client.client import GenerateClient as GenerateClient
from cluster.client.client import Prompt as Prompt
from cluster.client.client import generate_blocking as generate_blocking
from cluster.client.errors import CallFailed as CallFailed
