"""The former module of sampling parameters, which programs written against raypd 0.1 import."""

from actors.core.requests.sampling_params import SamplingParams as SamplingParams
