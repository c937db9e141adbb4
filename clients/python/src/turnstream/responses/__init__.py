"""Turns from responses of inference engines: vLLM, SGLang, OpenAI-compatible servers, Tinker.

Their packages are not imported. A response is any object, or its plain JSON. The shapes are those
of vLLM 0.33 and SGLang 0.5.23.
"""

from turnstream.responses.engines import from_sglang, from_tinker, from_vllm
from turnstream.responses.fields import TurnArguments
from turnstream.responses.openai_servers import from_openai

__all__ = ["TurnArguments", "from_openai", "from_sglang", "from_tinker", "from_vllm"]
