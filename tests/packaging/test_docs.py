"""README.md and docs/: what is said there works.

Three kinds of blocks are tried, each page in a temporary folder:

- ```python: runs, on its own.
- ```python whose first line is a comment with a file's name (``# train.py``): is saved under that name.
- ```console: a session. Lines that begin with ``$ python`` are run, in order, and say what stands below them; ``…``
  there is whatever comes. One that fails has its last line below it.

The first kind, of docs/integrations/, runs on two ranks, too: all blocks of a page in one pair of processes. So do the
files that a page has torchrun start (``STARTED_BY_TORCHRUN``). Those of torchtitan and Ray are run in
tests/integrations/.
"""

import ast
import json
import re
import shlex
import socket
import textwrap
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.support.processes import ROOT, TORCH, ForkServer

README = ROOT / "README.md"
PAGES = [README, *sorted((ROOT / "docs").rglob("*.md"))]
BLOCK = re.compile(r"^( *)```(\w+)\n(.*?)^ *```$", flags=re.DOTALL | re.MULTILINE)
FILE = re.compile(r"# ([\w-]+\.py)\n")
COMMAND = re.compile(r"^\$ (.*)\n", flags=re.MULTILINE)
IGNORED = ["`is_gradient_checkpointing`", "`gradient_checkpointing", "param_dtype='bfloat16'", "nvme_path"]
"""Warnings of PEFT and TRL, and of ``wrap`` where this processor multiplies bf16 slowly, or temporary files are in
memory."""
OPTIONS = ["-W", "error", *(word for message in IGNORED for word in ("-W", f"ignore:{message}"))]
"""Of the interpreter."""
LINK = re.compile(r"\]\(([^)#:\s]+)(?:#[^)]*)?\)")


def blocks(page: Path, language: str) -> Iterator[tuple[int, str]]:
    """The line at which each block begins, and what is in it."""
    text = page.read_text()
    for match in BLOCK.finditer(text):
        if match[2] == language:
            yield text.count("\n", 0, match.start()) + 1, textwrap.dedent(match[3])


@dataclass(frozen=True)
class Job:
    """A block or a command of a page, to be run."""

    page: Path
    line: int
    arguments: tuple[str, ...]
    """Of the interpreter."""
    output: str | None = None
    """None: no matter."""

    @property
    def name(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"


def files(page: Path) -> dict[str, str]:
    """The files that a page has its reader save."""
    named = [(match[1], code) for _, code in blocks(page, "python") if (match := FILE.match(code))]
    assert len({name for name, _ in named}) == len(named), f"{page}: one file twice"
    return dict(named)


def jobs(page: Path) -> Iterator[Job]:
    for line, code in blocks(page, "python"):
        if not FILE.match(code):
            yield Job(page, line, ("-c", code))
    for line, session in blocks(page, "console"):
        parts = COMMAND.split(session)[1:]
        for command, output in zip(parts[::2], parts[1::2], strict=True):
            words = shlex.split(command)
            if words[0] == "python":
                yield Job(page, line, tuple(words[1:]), output)


LIBRARIES = ("transformers.trainer", "accelerate", "lightning.pytorch", "flax.nnx")
"""Imports of several blocks, at most 4 s each. The process that blocks are forks of has done them already."""
OF_INTEGRATIONS = re.compile(
    r"\b(transformers|accelerate|lightning|flax|equinox|orbax|grain|peft|trl|ray|verl|torchtitan|datasets|matplotlib"
    r"|tensorboard|torchao|bitsandbytes|plot)\b",
    re.IGNORECASE,  # TensorBoard() imports tensorboardX
)


def is_integration(job: Job) -> bool:
    """True if a job, or one before it in its session, needs what ``make test-integrations`` installs."""
    code = [" ".join(job.arguments)]
    if job.output is not None:
        code += [*files(job.page).values(), *(session for _, session in blocks(job.page, "console"))]
    return any(map(OF_INTEGRATIONS.search, code))


def cases(page: Path) -> Iterator[list[Job]]:
    """Each block alone, and all commands of a page's sessions in one case: each needs those before it."""
    yield from ([job] for job in jobs(page) if job.output is None)
    if session := [job for job in jobs(page) if job.output is not None]:
        yield session


MARKED = [
    pytest.param(case, id=case[0].name, marks=pytest.mark.integration if any(map(is_integration, case)) else ())
    for page in PAGES
    for case in cases(page)
]


@pytest.fixture(scope="module")
def outcome_of(tmp_path_factory) -> Iterator[Callable[[Job], tuple[int, str]]]:
    """Runs a job, a command in the folder of its page; returns its exit status and its output."""
    servers: dict[bool, ForkServer] = {}
    folders: dict[Path, Path] = {}

    def run(job: Job) -> tuple[int, str]:
        if job.page not in folders:
            folders[job.page] = tmp_path_factory.mktemp("page")
            for name, code in files(job.page).items():
                (folders[job.page] / name).write_text(code)
        folder = tmp_path_factory.mktemp("block") if job.output is None else folders[job.page]
        [ran] = server_of(job).run(job.arguments, folder=folder, merge=True)
        return ran.returncode, ran.stdout

    def server_of(job: Job) -> ForkServer:
        if (needs := is_integration(job)) not in servers:
            libraries = LIBRARIES if needs else ()
            servers[needs] = ForkServer("jax", "frontends.jax", "optax", *TORCH, *libraries, options=OPTIONS)
        return servers[needs]

    yield run
    for server in servers.values():
        server.close()


@pytest.mark.long("starts the process that pages' blocks are forks of, which imports torch and JAX")
@pytest.mark.draws(6)
@pytest.mark.parametrize("case", MARKED)
def test_code_runs_and_says_what_stands_there(case, outcome_of):
    for job in case:
        assert_says_what_stands_there(job, *outcome_of(job))


def assert_says_what_stands_there(job: Job, status: int, output: str) -> None:
    if job.output is None:
        assert status == 0, output
        return
    expected = "\n".join(line.rstrip() for line in job.output.strip().splitlines())
    pattern = ".*?".join(map(re.escape, expected.split("…")))
    got = "\n".join(line.rstrip() for line in output.strip().splitlines())
    assert re.fullmatch(pattern, got, flags=re.DOTALL), f"{shlex.join(job.arguments)}\n{got}"
    assert status == 0 or not expected.splitlines()[-1].startswith("…"), output


# --- docs/integrations/ on two ranks ------------------------------------------------------------------

GROUP = """
import torch.distributed
torch.distributed.init_process_group("gloo")
"""
MESH = """
import functools, jax, frontends.jax
jax.config.update("jax_num_cpu_devices", 2)
mesh = jax.make_mesh((2,), ("dp",), axis_types=(jax.sharding.AxisType.Auto,))
frontends.jax.wrap = functools.partial(frontends.jax.wrap, mesh=mesh)
"""
"""Two devices of one process, which is how the page has ranks; each has half of the states."""
WHOLE_BATCH = "offloaded.value_and_grad"
"""In blocks of JAX that are for one device: on a mesh it takes a batch that is split, as docs/jax.md shows."""
EACH = """
for folder, code in json.loads(sys.argv[1]).items():
    os.chdir(folder)
    print(folder, flush=True)
    exec(compile(code, folder, "exec"), {"__name__": "__main__"})
"""
TOGETHER = {
    **dict.fromkeys(
        ("trainer", "transformers"), "from accelerate import PartialState as Ranks\nassert Ranks().num_processes == 2"
    ),
    "lightning": "assert trainer(1).world_size == 2",
}
"""Code that follows the last block of a page, in its names. It checks that the libraries know of both ranks."""


def launched(n_ranks: int) -> list[dict[str, str]]:
    """The environment of each rank, as torchrun makes it; of one rank, without it."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    shared = {"ACCELERATE_USE_CPU": "true", "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    if n_ranks == 1:
        return [shared]
    n = str(n_ranks)
    shared |= {"WORLD_SIZE": n, "LOCAL_WORLD_SIZE": n, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    return [shared | {"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(n_ranks)]


def run_all(folders: dict[Path, str], start: str, n_processes: int) -> None:
    """Run these blocks, each in its folder, in order, in each of so many processes."""
    code = "import json, os, sys" + start + EACH
    command = ("-c", code, json.dumps({str(folder): block for folder, block in folders.items()}))
    server = ForkServer(options=OPTIONS)
    try:
        done = server.run(*[command] * n_processes, environments=launched(n_processes), merge=True, seconds=200)
        assert [ran.returncode for ran in done] == [0] * n_processes, "\n\n".join(ran.stdout for ran in done)
    finally:
        server.close()


@pytest.mark.long("starts the process that pages' blocks are forks of, which imports torch and JAX")
def test_the_complete_loop_resumes_with_the_bits_of_the_uninterrupted_one_in_every_stage(tmp_path, monkeypatch):
    [code] = [code for _, code in blocks(ROOT / "docs" / "torch.md", "python") if "def train(folder" in code]
    monkeypatch.chdir(tmp_path)
    space: dict[str, Callable] = {}
    exec(code, space)  # two runs, of which the second resumes
    found = {stage: space["train"](f"stage-{stage}", 2, stage=stage) for stage in (1, 2, 3)}
    resumed = {stage: [space["train"](f"resumed-{stage}", n, stage=stage) for n in (1, 2)][-1] for stage in (2, 3)}
    assert {*found.values(), *resumed.values()} == {found[2]}


@pytest.mark.slow
@pytest.mark.parametrize(
    "page",
    [
        page
        for page in PAGES
        if page.parent.name == "integrations" and any(job.arguments[0] == "-c" for job in jobs(page))
    ],
    ids=lambda page: page.stem,
)
def test_all_blocks_of_an_integration_run_on_two_ranks(page, tmp_path):
    folders = {}
    for line, code in blocks(page, "python"):
        if not FILE.match(code) and WHOLE_BATCH not in code:
            folders[tmp_path / f"line-{line}"] = code.replace("devices=1,", "devices=2,")  # as the page says
    folders[[*folders][-1]] += TOGETHER.get(page.stem, "")
    for folder in folders:
        folder.mkdir()
    run_all(folders, MESH if page.stem == "jax" else GROUP, 1 if page.stem == "jax" else 2)


TINY = """
import json, os
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
words = {"<pad>": 0, "<eos>": 1, **{f"w{i}": i for i in range(2, 64)}}
tokenizer = Tokenizer(models.WordLevel(words, unk_token="<pad>"))
tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>")
fast.chat_template = "{% for message in messages %}{{ message['content'] }} {% endfor %}"
fast.save_pretrained("model")
config = LlamaConfig(vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2)
LlamaForCausalLM(config).save_pretrained("model")
said = [{"role": "user", "content": "w2 w3"}, {"role": "assistant", "content": "w4 w5"}]
os.mkdir("data")
with open("data/train.jsonl", "w") as file:
    file.writelines(json.dumps({"messages": said}) + "\\n" for _ in range(32))
"""
"""In place of what ``sft.py`` downloads: a model with its tokenizer, and a set of conversations."""


@pytest.mark.slow
def test_the_script_of_trl_trains_a_small_model_on_one_rank_and_on_two(tmp_path):
    [script] = files(ROOT / "docs" / "integrations" / "trainer.md").values()
    here = {
        '"Qwen/Qwen3-0.6B"': '"../model"',
        '"trl-lib/Capybara"': '"../data"',
        'SFTConfig("runs")': 'SFTConfig("runs", use_cpu=True)',  # bfloat16, TRL's default, is else for accelerators
    }
    for there, instead in here.items():
        assert script.count(there) == 1
        script = script.replace(there, instead)
    server = ForkServer()
    try:
        [made] = server.run(("-c", TINY), folder=tmp_path, merge=True)
        assert made.returncode == 0, made.stdout
        for n_ranks in (1, 2):
            folder = tmp_path / str(n_ranks)
            folder.mkdir()
            end = f"\nassert trainer.args.world_size == {n_ranks} and trainer.state.global_step == {12 // n_ranks}\n"
            done = server.run(
                *[("-c", script + end)] * n_ranks, folder=folder, environments=launched(n_ranks), merge=True
            )
            assert [ran.returncode for ran in done] == [0] * n_ranks, "\n\n".join(ran.stdout for ran in done)
            assert (folder / "runs" / f"checkpoint-{12 // n_ranks}" / "offload").is_dir()
    finally:
        server.close()


SHARDED = "from tests.support import fsdp_on_cpu\nfsdp_on_cpu.allow()\n"
"""Code before that of pages on FSDP2 in Accelerate, which shards on accelerators alone."""
STARTED_BY_TORCHRUN = [
    ("fsdp2.md", "fsdp2.py", 2, ""),
    ("fsdp2.md", "own_loop.py", 2, ""),
    ("fsdp2.md", "two_dimensions.py", 4, ""),
    ("integrations/transformers.md", "fsdp2_accelerate.py", 2, SHARDED),
    ("integrations/transformers.md", "fsdp2_trainer.py", 2, SHARDED + GROUP),
]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("page", "name", "n_ranks", "start"), STARTED_BY_TORCHRUN, ids=lambda value: str(value).partition("\n")[0]
)
def test_a_script_of_a_page_runs_on_several_ranks(page, name, n_ranks, start, tmp_path):
    code = files(ROOT / "docs" / page)[name]
    server = ForkServer()
    try:
        done = server.run(
            *[("-c", start + code)] * n_ranks, folder=tmp_path, environments=launched(n_ranks), merge=True
        )
        assert [ran.returncode for ran in done] == [0] * n_ranks, "\n\n".join(ran.stdout for ran in done)
    finally:
        server.close()


@pytest.mark.parametrize("page", ["fsdp2.md", "integrations/torchtitan.md", "integrations/ray.md"])
def test_a_script_for_those_who_shard_already_has_at_most_60_lines(page):
    for name, code in files(ROOT / "docs" / page).items():
        assert len(code.splitlines()) <= 60, name


def test_there_are_examples_for_both_frameworks_and_the_two_commands():
    code = "".join(code for _, code in blocks(README, "python"))
    assert {"torch", "jax"} <= set(re.findall(r"frontends\.(\w+)", code))
    assert "make train" in README.read_text()[:800]
    assert "make test" in README.read_text()[:800]


@pytest.mark.draws(67)
@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_files_are_used_and_links_lead_somewhere(page):
    text = page.read_text()
    for name in files(page):
        assert len(re.findall(rf"\b{Path(name).stem}\b", text)) > 1, f"{name} is saved and not used"
    for target in LINK.findall(re.sub(r"^```.*?^```$", "", text, flags=re.DOTALL | re.MULTILINE)):
        assert (page.parent / target).exists(), target


ANCHOR = re.compile(r"\]\(([^)#:\s]*)#([^)\s]+)\)")


def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub and Sphinx make them."""
    headings = re.findall(r"^#+ (.*)$", without_blocks(page), flags=re.MULTILINE)
    plain = [re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", heading).replace("`", "").strip().lower() for heading in headings]
    return {re.sub(r"[^\w\- ]", "", heading).replace(" ", "-") for heading in plain}


def without_blocks(page: Path) -> str:
    return re.sub(r"^ *```.*?^ *```$", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)


@pytest.mark.draws(74)
@pytest.mark.parametrize("page", [*PAGES, ROOT / "CONTRIBUTING.md"], ids=lambda page: str(page.relative_to(ROOT)))
def test_an_anchor_of_a_link_is_a_heading_there(page):
    links = [
        (page.parent / target if target else page, anchor) for target, anchor in ANCHOR.findall(without_blocks(page))
    ]
    assert [(str(to), anchor) for to, anchor in links if to.suffix == ".md" and anchor not in anchors(to)] == []


FUSED = re.compile(r"AdamW\(fused=True\)|fused AdamW|adamw_torch_fused")
PROMISE = re.compile(r"\b(bits|bit for bit|equals)\b")
PARTS = re.compile(r"\n\s*\n|\n(?=\s*[-|*] )")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_who_promises_the_bits_of_fused_adamw_says_for_which_tensors(page):
    text = re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    promises = [part for part in PARTS.split(text) if FUSED.search(part) and PROMISE.search(part)]
    assert [part for part in promises if "multiple of 8 elements" not in " ".join(part.split())] == []


# --- docs/troubleshooting.md -------------------------------------------------------------------------

TROUBLESHOOTING = ROOT / "docs" / "troubleshooting.md"
MESSAGE = re.compile(r"^- `(.+)`\\$", flags=re.MULTILINE)
MESSAGES = MESSAGE.findall(TROUBLESHOOTING.read_text())


def templates(source: str) -> Iterator[str]:
    """The strings in code, but for docstrings; what is filled in is ``…``."""
    tree = ast.parse(source)
    documented = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            yield "".join(part.value if isinstance(part, ast.Constant) else "…" for part in node.values)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in documented:
            yield node.value


@pytest.fixture(scope="module")
def said() -> list[str]:
    paths = [path for folder in ("offload_core", "frontends") for path in sorted((ROOT / folder).rglob("*.py"))]
    return [template for path in paths for template in templates(path.read_text())]


@pytest.mark.draws(50)
@pytest.mark.parametrize("message", MESSAGES)
def test_a_message_on_the_page_is_one_of_the_code(message, said):
    parts = [part for part in message.split("…") if part]
    assert max(map(len, parts)) >= 10, "too little of it to be told from others"
    pattern = re.compile(".*".join(map(re.escape, parts)), flags=re.DOTALL)
    assert any(pattern.search(template) for template in said), "no error says so any more"


def test_strings_of_the_code_are_found_and_docstrings_are_not():
    code = '"""a module"""\ndef f(x):\n    """a function"""\n    raise ValueError(f"{x}: got" " it")\n'
    assert "…: got it" in templates(code)
    assert not {"a module", "a function"} & set(templates(code))
