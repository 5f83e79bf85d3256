"""The former place of sampling parameters, which programs written by the documents of raypd 0.1 import."""

from actors.core.requests.sampling_params import SamplingParams as SamplingParams
