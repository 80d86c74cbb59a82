"""The scripts of examples/: what they train, what they say of wrong input, and how they go on."""

import ast
import hashlib
import json
import math
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, TrainingArguments

from tests.support import simulated
from tests.support.chats import LONGEST, chat, save_chats, save_model
from tests.support.hugging_face import ExactNorm
from tests.support.processes import ROOT, TORCH, ForkServer, free_port
from tests.support.torch_models import same_bits

pytestmark = pytest.mark.filterwarnings("ignore:`(is_)?gradient_checkpointing` is deprecated:FutureWarning")  # PEFT's

EXAMPLES = ROOT / "examples"
ALONE = {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
SETTINGS = ("--micro-batch", 4, "--accumulate", 2, "--epochs", 3, "--lr", 0.02, "--save-every", 4, "--held-out", 0.1)
N_UPDATES = 13  # 36 chats, 3 epochs, 8 an update
KILLED_AFTER = """
import os, runpy, signal, sys
from offload_core.step_log import StepLog
write = StepLog.write
def killed(log, step, record):
    write(log, step, record)
    if step == {step}:
        os.kill(os.getpid(), signal.SIGKILL)
StepLog.write = killed
sys.path.insert(0, {folder!r})
sys.argv = [{script!r}, *sys.argv[1:]]
runpy.run_path({script!r}, run_name="__main__")
"""


@pytest.mark.parametrize("script", sorted(EXAMPLES.glob("*.py")), ids=lambda path: path.name)
def test_an_example_has_at_most_80_lines_and_names_nothing_private(script):
    text = script.read_text()
    assert len(text.splitlines()) <= 80
    for node in ast.walk(ast.parse(text)):
        names = [node.attr] if isinstance(node, ast.Attribute) else []
        if isinstance(node, ast.ImportFrom):
            names = [*(node.module or "").split("."), *(each.name for each in node.names)]
        assert not [name for name in names if name.startswith("_") and not name.startswith("__")], ast.unparse(node)


@pytest.fixture(scope="module")
def server() -> Iterator[ForkServer]:
    libraries = ("jax", "frontends.jax", "peft", "transformers.models.llama.modeling_llama")
    server = ForkServer(*TORCH, *libraries, environment=ALONE)
    yield server
    server.close()


@pytest.fixture(scope="module")
def given(tmp_path_factory) -> Path:
    """A folder with a model and a file of chats."""
    folder = tmp_path_factory.mktemp("given")
    save_model(folder / "model")
    save_chats(folder / "chats.jsonl", 40)
    (folder / "text.txt").write_text("the same words again and again, " * 100)
    (folder / "words.txt").write_text(" ".join(f"w{i % 20 + 2}" for i in range(2000)))
    return folder


def command(script, *arguments, killed_after=None):
    """The interpreter's arguments that run an example; a run that is killed ends after this record."""
    path = str(EXAMPLES / script)
    start = (path,)
    if killed_after is not None:
        start = ("-c", KILLED_AFTER.format(step=killed_after, folder=str(EXAMPLES), script=path))
    return (*start, *arguments)


@pytest.fixture
def finetune(server, given, tmp_path):
    """Runs the script in an empty folder; returns its status, its output, and what it said last of an error."""

    def run(*options, model=given / "model", chats=given / "chats.jsonl", out="out", killed_after=None):
        asked = command("finetune.py", model, chats, out, *SETTINGS, *options, killed_after=killed_after)
        [ran] = server.run(asked, folder=tmp_path)
        error = ran.stderr.splitlines()[-1] if ran.returncode == 1 else ran.stderr
        return ran.returncode, ran.stdout, error

    return run


def records(folder):
    return [json.loads(line) for line in (folder / "steps.jsonl").read_text().splitlines()]


def losses(folder):
    return [(record["step"], record["loss"], record.get("eval_loss")) for record in records(folder)]


def falls(folder, to=0.9):
    """True if the losses of the last three updates are this share of those of the first three, or less."""
    each = [record["loss"] for record in records(folder)]
    return sum(each[-3:]) < to * sum(each[:3])


def digest(folder):
    [path] = [path for path in folder.rglob("*.safetensors") if "checkpoints" not in path.parts]
    return hashlib.sha256(path.read_bytes()).hexdigest()


def test_finetune_trains_evaluates_exports_and_a_killed_run_goes_on_with_the_same_bits(finetune, given, tmp_path):
    status, said, error = finetune()
    assert status == 0, error
    assert said.index("stage 2") < said.index("finished: the trained model is in out/model")
    assert "tokens/s" in error  # the bar
    found = records(tmp_path / "out")
    assert [record["step"] for record in found] == [*range(1, N_UPDATES + 1)]
    assert falls(tmp_path / "out")
    assert [record["step"] for record in found if "eval_loss" in record] == [4, 8, 12, 13]
    assert found[-1]["eval_loss"] < found[3]["eval_loss"]
    assert all(record["tokens_per_second"] > 0 and record["host_bytes"] > 0 for record in found)
    assert found[-1]["seconds_left"] == 0
    rates = [record["lr"] for record in found]
    assert rates.index(max(rates)) <= 1  # after the warm-up
    assert rates[-1] < 0.05 * max(rates)

    tokens = AutoTokenizer.from_pretrained(tmp_path / "out" / "model")("w2 w3 w4", return_tensors="pt")
    trained = AutoModelForCausalLM.from_pretrained(tmp_path / "out" / "model")
    assert trained.dtype is torch.bfloat16
    assert trained(**tokens).logits.isfinite().all()
    before = AutoModelForCausalLM.from_pretrained(given / "model")
    assert not same_bits(trained.lm_head.weight.float(), before.lm_head.weight)

    status, said, error = finetune(out="killed", killed_after=6)  # the last checkpoint is of update 4
    assert status == -9, error
    assert len(records(tmp_path / "killed")) == 6
    assert not [*(tmp_path / "killed" / "model").glob("*.safetensors")]
    status, said, error = finetune(out="killed")
    assert status == 0, error
    assert digest(tmp_path / "killed") == digest(tmp_path / "out")
    assert losses(tmp_path / "killed") == losses(tmp_path / "out")

    status, said, error = finetune()
    assert status == 0
    assert said == "finished: the trained model is in out/model; to train anew, name another folder than out\n"


def test_finetune_weighs_all_learned_tokens_of_an_update_alike(server, given, tmp_path):
    """Whatever micro-batch a token is in: the sum of the micro-batches' losses is the mean of one whole batch."""
    code = """
import sys
sys.path.insert(0, sys.argv[1])
import torch
from chats import by_length, micro_batches, read_chats
from transformers import AutoModelForCausalLM, AutoTokenizer
model, tokenizer = AutoModelForCausalLM.from_pretrained(sys.argv[2]), AutoTokenizer.from_pretrained(sys.argv[2])
chats = read_chats(sys.argv[3], tokenizer, 32)
[update, *others] = by_length(chats, 8, 3)
assert len(others) == 14 and by_length(chats, 8, 3)[0][0][0].equal(update[0][0])
assert not all(a[0][0].equal(b[0][0]) for a, b in zip(others, by_length(chats, 8, 3, seed=1)))
lost, total = 0.0, 0
for tokens, labels in update:
    asked = len(tokens) // 2  # the answer is as long as the question
    assert (labels[:asked] == -100).all() and labels[asked:].equal(tokens[asked:])
    logits = model(tokens[None]).logits[0, :-1].double()
    lost -= logits.log_softmax(-1).gather(1, tokens[1:, None])[asked - 1 :].sum()
    total += asked
for size in (1, 3, 8):
    batches = [*micro_batches(update, size, "cpu")]
    assert sum(len(batch["input_ids"]) for batch in batches) == 8
    torch.testing.assert_close(sum(model(**batch).loss for batch in batches).double(), lost / total, rtol=1e-5, atol=0)
masks = [batch["attention_mask"] for each in [update, *others] for batch in micro_batches(each, 8, "cpu")]
padded, used = sum(mask.numel() for mask in masks), sum(int(mask.sum()) for mask in masks)
assert padded < 1.2 * used, padded / used
"""
    [ran] = server.run(("-c", code, EXAMPLES, given / "model", given / "chats.jsonl"), folder=tmp_path, merge=True)
    assert ran.returncode == 0, ran.stdout


@pytest.mark.parametrize("options", [("--states", "8bit"), ("--offload-param", "--dtype", "float32")], ids=" ".join)
def test_finetune_trains_with_other_states_and_parameters_in_host_memory(finetune, tmp_path, options):
    status, _, error = finetune(*options)
    assert status == 0, error
    assert falls(tmp_path / "out")
    AutoModelForCausalLM.from_pretrained(tmp_path / "out" / "model")


class SameOrder(ExactNorm):
    """Trainer on the micro-batches of finetune.py, in its order."""

    def get_train_dataloader(self):
        return self.train_dataset


def by_trainer(folder, model, chats, dtype, lr=0.02, **settings):
    """Train as finetune.py does, and return the loss of each update."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(EXAMPLES)
        from chats import by_length, micro_batches, read_chats
    found = read_chats(chats, AutoTokenizer.from_pretrained(model), LONGEST)
    n_held_out = round(0.1 * len(found))
    batches = [batch for update in by_length(found[n_held_out:], 8, 3) for batch in micro_batches(update, 4, "cpu")]
    n_updates = len(batches) // 2
    args = TrainingArguments(
        folder,
        learning_rate=lr,
        lr_scheduler_type="cosine",
        warmup_steps=round(0.03 * n_updates),
        max_steps=n_updates,
        gradient_accumulation_steps=2,
        per_device_train_batch_size=4,
        max_grad_norm=1.0,
        optim="adamw_torch_fused",
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        use_cpu=True,
        dataloader_pin_memory=False,
        **settings,
    )
    data = [{name: batch[name] for name in ("input_ids", "attention_mask", "labels")} for batch in batches]
    trainer = SameOrder(AutoModelForCausalLM.from_pretrained(model, dtype=dtype), args, train_dataset=data)
    trainer.train()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def test_finetune_has_the_losses_of_trainer_with_fused_adamw(finetune, given, tmp_path):
    status, _, error = finetune("--dtype", "float32")
    assert status == 0, error
    expected = by_trainer(tmp_path / "trainer", given / "model", given / "chats.jsonl", torch.float32)
    found = [record["loss"] for record in records(tmp_path / "out")]
    assert len(found) == N_UPDATES
    assert found == pytest.approx(expected, abs=5e-5)  # Trainer rounds the losses that it logs


@pytest.mark.slow
def test_the_losses_of_a_model_like_smollm_are_those_of_trainer_in_fp32_and_near_them_in_bf16(finetune, tmp_path):
    """With two layers and a vocabulary of 49,152. Prints the losses (``-s``), which docs/examples.md shows."""
    model = save_model(tmp_path / "model", vocabulary=49_152, hidden=576)
    chats = save_chats(tmp_path / "chats.jsonl", 40, vocabulary=49_152)
    found = {}
    for dtype in ("float32", "bfloat16"):
        status, _, error = finetune("--dtype", dtype, "--lr", 1e-3, model=model, chats=chats, out=dtype)
        assert status == 0, error
        found[f"finetune.py, {dtype}"] = [record["loss"] for record in records(tmp_path / dtype)]
    trained = {
        "float32": (torch.float32, {}),
        "bf16=True": (torch.float32, {"bf16": True}),
        "bfloat16": (torch.bfloat16, {}),
    }
    for name, (dtype, settings) in trained.items():
        got = by_trainer(tmp_path / "trainer", model, chats, dtype, 1e-3, gradient_checkpointing=True, **settings)
        found[f"Trainer, {name}"] = got
    print("update", *found, sep=" | ")
    for n, row in enumerate(zip(*found.values(), strict=True), 1):
        print(n, *(f"{loss:.4f}" for loss in row), sep=" | ")
    expected = found["Trainer, float32"]
    assert expected[-1] < 0.8 * expected[0]
    assert found["finetune.py, float32"] == pytest.approx(expected, abs=5e-5)
    assert found["finetune.py, bfloat16"] == pytest.approx(expected, rel=0.05)


# --- wrong input -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("lines", "expected"),
    [
        ("", "chats.jsonl: the file is empty; expected {"),
        (chat(["w2"]) + '{"messages": [}\n', "chats.jsonl, line 2: JSONDecodeError"),
        (chat(["w2"]) * 2 + '{"text": "w2"}\n', "chats.jsonl, line 3: KeyError('messages'); expected {"),
        (chat(["w2"]) + '\n{"messages": []}\n', "chats.jsonl, line 3: IndexError"),
        ('{"messages": "w2"}\n', "chats.jsonl, line 1: TypeError"),
        ('{"messages": [{"content": "w2"}]}\n', "chats.jsonl, line 1: KeyError('role')"),
        ('{"messages": [{"role": "user", "content": null}]}\n', "chats.jsonl, line 1: TypeError"),
        ('\ufeff{"messages": [{"role": "user", "content": "w2\u2028"}]}\n\n[]\n', "chats.jsonl, line 3: TypeError"),
        (chat(["w2"]) + '["w2"]\n', "chats.jsonl, line 2: TypeError"),
        (chat(["w2"]) * 2, "1 chats are left to train on, and one update takes 8: add some, or lower --accumulate"),
    ],
    ids=[
        "empty",
        "broken",
        "without messages",
        "no messages",
        "a text",
        "no role",
        "no content",
        "a byte-order mark",
        "a list",
        "too few",
    ],
)
def test_finetune_names_the_wrong_line(finetune, tmp_path, lines, expected):
    (tmp_path / "chats.jsonl").write_text(lines, encoding="utf-8")
    status, said, error = finetune(chats="chats.jsonl")
    assert status == 1
    assert "nothing fits" not in said
    assert error.startswith(expected)
    assert not (tmp_path / "out").exists()


def test_finetune_refuses_chats_that_are_too_long_and_cuts_them_if_told_so(finetune, given, tmp_path):
    long = chat(["w5"] * LONGEST)
    (tmp_path / "chats.jsonl").write_text(chat(["w2"]) + long + (given / "chats.jsonl").read_text() + long)
    status, said, error = finetune(chats="chats.jsonl")
    assert (status, said) == (1, "")
    assert error == (
        "chats.jsonl: 2 of 43 chats are longer than 32 tokens, the model's most; the first is in line 2. "
        "Take them out, or cut them with --truncate"
    )
    status, said, error = finetune("--truncate", chats="chats.jsonl")
    assert status == 0, error
    assert "2 of 43 chats are longer than 32 tokens, the model's most: they are cut\n" in said
    assert not math.isnan(records(tmp_path / "out")[-1]["loss"])


def test_finetune_leaves_out_chats_without_an_answer_to_learn(finetune, given, tmp_path):
    asks = json.dumps({"messages": [{"role": "user", "content": "w2 w3"}]}) + "\n"
    (tmp_path / "chats.jsonl").write_text(asks * 40)
    status, said, error = finetune(chats="chats.jsonl")
    assert status == 1
    assert "learning from 0 of 40 chats" in said
    assert error == "chats.jsonl: there is no answer to learn, or the chat template marks none"
    (tmp_path / "chats.jsonl").write_text(asks * 40 + (given / "chats.jsonl").read_text())
    status, said, error = finetune(chats="chats.jsonl")
    assert status == 0, error
    assert "learning from 40 of 80 chats: answers alone" in said
    assert not any(math.isnan(record["loss"]) for record in records(tmp_path / "out"))


@pytest.mark.parametrize("wrong", [("--lr", -1), ("a file",)])
def test_finetune_refuses_a_rate_and_a_file_before_it_reads_anything(finetune, tmp_path, wrong):
    (tmp_path / "a file").touch()
    options = () if wrong == ("a file",) else wrong
    status, said, error = finetune(*options, model="absent", out="a file" if not options else "out")
    assert (status, said) == (2, "")
    assert error.rstrip().endswith("expected a folder, not a file, and a rate above 0")


def test_a_template_that_only_asks_for_an_answer_marks_none(finetune, tmp_path):
    asks = "{% if add_generation_prompt %}w2 {% endif %}"
    save_model(tmp_path / "base", template="{% for m in messages %}{{ m['content'] }} {% endfor %}" + asks)
    status, said, error = finetune(model="base")
    assert status == 0, error
    assert "learning from 40 of 40 chats: all tokens" in said


def test_finetune_needs_a_template_of_chats(finetune, tmp_path):
    save_model(tmp_path / "base", template=None)
    status, said, error = finetune(model="base")
    assert (status, said) == (1, "")
    assert error == "base: its tokenizer has no chat template; expected a model for chats"


def test_finetune_says_what_to_change_before_it_loads_a_model_that_does_not_fit(finetune, given, tmp_path):
    """There are no weights at all to load."""
    folder = tmp_path / "large"
    AutoTokenizer.from_pretrained(given / "model").save_pretrained(folder)
    config = LlamaConfig(hidden_size=2**13, intermediate_size=2**15, num_hidden_layers=80, num_attention_heads=64)
    config.save_pretrained(folder)
    status, said, error = finetune(model=folder)
    assert status == 1
    assert "nothing fits:" in said
    assert "made smaller by" in said
    assert error.startswith("the lines above say why this cannot be trained here; --offload-param and")
    assert not (tmp_path / "out" / "steps.jsonl").exists()


# --- the other examples ----------------------------------------------------------------------------------

TINY = ("--width", 32, "--layers", 2, "--context", 16, "--batch", 8)
RUN = ("--updates", 12, "--save-every", 4, "--lr", 0.02)
OTHERS = {
    "pretrain_torch.py": ("text.txt", "OUT", *TINY, *RUN),
    "pretrain_jax.py": ("text.txt", "OUT", *TINY, *RUN, "--cpu-devices", 2),
    "fsdp2.py": ("model", "words.txt", "OUT", "--context", 16, *RUN),
    "larger_than_the_gpu.py": ("model", "words.txt", "OUT", "--context", 16, "--micro-batches", 4, *RUN),
    "lora_qlora.py": ("model", "chats.jsonl", "OUT", "--accumulate", 2, "--save-every", 4, "--lr", 0.01, "--epochs", 4),
}
"""The arguments of each example that saves and goes on; files and folders lie in the folder of ``given``."""


def arguments(name, given, out, options=None):
    options = OTHERS[name] if options is None else options
    return [out if each == "OUT" else given / each if str(each) in FILES else each for each in options]


FILES = {"model", "chats.jsonl", "text.txt", "words.txt"}


@pytest.mark.parametrize("name", OTHERS)
def test_an_example_trains_and_a_killed_run_goes_on_with_the_same_bits(name, server, given, tmp_path):
    def run(out, killed_after=None):
        asked = command(name, *arguments(name, given, out), killed_after=killed_after)
        [ran] = server.run(asked, folder=tmp_path)
        return ran

    ran = run("out")
    assert ran.returncode == 0, ran.stderr
    assert falls(tmp_path / "out", to=0.95)
    assert run("killed", killed_after=6).returncode == -9
    assert len(records(tmp_path / "killed")) == 6
    ran = run("killed")
    assert ran.returncode == 0, ran.stderr
    assert losses(tmp_path / "killed") == losses(tmp_path / "out")
    assert digest(tmp_path / "killed") == digest(tmp_path / "out")
    if (tmp_path / "out" / "model").exists():
        AutoModelForCausalLM.from_pretrained(tmp_path / "out" / "model")
    if (tmp_path / "out" / "adapter").exists():
        base = AutoModelForCausalLM.from_pretrained(given / "model")
        adapted = PeftModel.from_pretrained(base, tmp_path / "out" / "adapter")
        assert any("lora_B" in name and param.any() for name, param in adapted.named_parameters())


@pytest.mark.parametrize("name", ["pretrain_torch.py", "fsdp2.py"])
def test_an_example_trains_on_two_ranks(name, server, given, tmp_path):
    shared = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    ranks = [shared | {"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(2)]
    asked = command(name, *arguments(name, given, "out"))
    done = server.run(asked, asked, environments=ranks, folder=tmp_path, merge=True)
    assert [ran.returncode for ran in done] == [0, 0], "\n\n".join(ran.stdout for ran in done)
    assert falls(tmp_path / "out")
    assert len(digest(tmp_path / "out")) == 64


@pytest.mark.parametrize("options", [("--four-bits",), ("--four-bits", "--offload-param")], ids=" ".join)
def test_adapters_train_on_a_base_in_four_bits(options, server, given, tmp_path):
    pytest.importorskip("bitsandbytes")
    asked = command("lora_qlora.py", *arguments("lora_qlora.py", given, "out"), *options)
    [ran] = server.run(asked, folder=tmp_path)
    assert ran.returncode == 0, ran.stderr
    assert falls(tmp_path / "out", to=0.95)


def test_an_actor_trains_in_phases_and_its_reward_is_logged(server, given, tmp_path):
    sizes = ("--prompts", "w2 w3", "w4 w5 w6", "--rounds", 12, "--tokens", 8, "--texts", 16, "--lr", 0.01)
    [ran] = server.run(command("rl_phases.py", given / "model", "out", *sizes), folder=tmp_path)
    assert ran.returncode == 0, ran.stderr
    rewards = [record["reward"] for record in records(tmp_path / "out")]
    assert len(rewards) == 12
    assert sum(rewards[-3:]) > 1.2 * sum(rewards[:3])
    distances = [record["kl"] for record in records(tmp_path / "out")]
    assert distances[0] < 1e-3 < distances[-1]  # it moves away from the reference
    AutoModelForCausalLM.from_pretrained(tmp_path / "out" / "model")


def test_a_model_from_scratch_with_states_on_a_disk_trains(server, given, tmp_path):
    (tmp_path / "disk").mkdir()
    asked = command("larger_than_the_gpu.py", *arguments("larger_than_the_gpu.py", given, "out"))
    [ran] = server.run((*asked, "--from-scratch", "--disk", "disk"), folder=tmp_path)
    assert ran.returncode == 0, ran.stderr
    assert falls(tmp_path / "out")


ON_AN_ACCELERATOR = """
import runpy, sys
from tests.support import simulated
simulated.load()
sys.path.insert(0, {folder!r})
runpy.run_path({script!r}, run_name="__main__")
"""


@pytest.mark.skipif((missing := simulated.why_not()) is not None, reason=missing or "")
@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("finetune.py", ("model", "chats.jsonl", "OUT", *SETTINGS)),
        ("larger_than_the_gpu.py", OTHERS["larger_than_the_gpu.py"]),
        ("lora_qlora.py", (*OTHERS["lora_qlora.py"], "--offload-param")),
        ("rl_phases.py", ("model", "OUT", "--prompts", "w2 w3", "--rounds", 2, "--tokens", 4)),
    ],
)
def test_an_example_runs_on_an_accelerator_and_records_its_memory(name, options, server, given, tmp_path):
    code = ON_AN_ACCELERATOR.format(folder=str(EXAMPLES), script=str(EXAMPLES / name))
    [ran] = server.run(("-c", code, *arguments(name, given, "out", options)), folder=tmp_path)
    assert ran.returncode == 0, ran.stderr
    assert all(record["device_peak_bytes"] > record["device_bytes"] > 0 for record in records(tmp_path / "out"))
