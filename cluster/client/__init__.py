"""A client of raypd.v1, for Python programs and for the command line."""

from cluster.client.blocking import BlockingClient as BlockingClient
from cluster.client.blocking import generate_blocking as generate_blocking
from cluster.client.client import GenerateClient as GenerateClient
from cluster.client.client_credentials import Credentials as Credentials
from cluster.client.errors import CallFailed as CallFailed
from cluster.client.options import ChatTurn as ChatTurn
from cluster.client.options import Options as Options
from cluster.client.options import Prompt as Prompt
from cluster.client.whole_answers import Answer as Answer
