"""What a model says is what transformers' own generate makes of the same weights."""

from __future__ import annotations

import asyncio
import json
import socket
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner

from shoal.cli.base import UNREACHABLE, WRONG, app
from shoal.client import connect
from shoal.client.errors import RecordError
from shoal.client.files.records import record_of, write_run
from shoal.client.models import models
from shoal.client.models.adapters import of_adapter, plain_name, save_config
from shoal.client.runs import weights
from shoal.client.runs.sample import SampleError, Speaker, speaker, speaker_before
from shoal.job import Job
from shoal.net.printable import printable_lines

from ..chat.chats import other_words, tokenizer, write_chats, write_model
from ..files.test_pretrained import Lab, lab  # noqa: F401 (a fixture)

pytestmark = [
    pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing.:FutureWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning:peft"),
]
PROMPT, TOKENS = "Where is the boat?", 12


def nobody(name: str) -> Any:
    raise AssertionError(f"{name} is asked of a broker")


@torch.no_grad()
def plain_text(model: Any, prompt: str, words: Any = None, system: str = "") -> str:
    """Greedy by hand: the whole text through the model for each token."""
    words = words or tokenizer()
    chat = [{"role": "system", "content": system}] if system else []
    chat.append({"role": "user", "content": prompt})
    text = words.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    ids = words(text, add_special_tokens=False).input_ids
    said: list[int] = []
    for _ in range(TOKENS):
        said.append(int(model(input_ids=torch.tensor([ids + said])).logits[0, -1].argmax()))
        if said[-1] == words.eos_token_id:
            break
    return str(words.decode(said, skip_special_tokens=True))


def says(one: Speaker, prompt: str = PROMPT) -> str:
    return one.says(prompt, TOKENS)


def job_of(folder: Path, **changes: Any) -> Job:
    tables: dict[str, Any] = {
        "model": {"factory": "hf:model"},
        "data": {"kind": "chat", "source": "chats.jsonl", "length": 64, "holdout": 0.0},
        "train": {"steps": 4, "batch": 4, "microbatch": 2, "lr": 0.05, "weight_decay": 0.0},
        "plan": {"scheduler": "uniform", "stages": 2},
        "output": {"to": str(folder / "runs")},
    }
    for key, table in changes.items():
        tables[key] = tables[key] | table
    return Job(**tables, folder=folder)


async def trained(lab: Lab, job: Job, *, export: bool = True) -> Path:  # noqa: F811
    """The run's folder."""
    await asyncio.gather(*(lab.join(f"p{i}") for i in range(2)))

    def follow() -> Path:
        with connect(lab.broker.address) as client:
            run = client.submit(job)
            run.wait()
            if export:
                run.export()
            else:
                run.keep_checkpoint()
            return run.folder

    return await asyncio.to_thread(follow)


def test_an_adapter_speaks_as_peft_has_it(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    base = write_model(tmp_path / "model", "llama")
    lora = {"r": 4, "lora_alpha": 32, "target_modules": "auto"}
    job = job_of(tmp_path, model={"lora": lora}, output={"format": "peft"})
    home, module = tmp_path / "runs" / "r-1", models.build(job)
    with torch.no_grad():
        for number, parameter in enumerate(p for p in module.parameters() if p.requires_grad):
            parameter.normal_(0.0, 0.5, generator=torch.Generator().manual_seed(number))
    (home / "sidecars").mkdir(parents=True)
    _, names = save_config(module, home / "sidecars")
    plain = plain_name(module)
    values = {plain(n): p.detach() for n, p in module.named_parameters() if p.requires_grad}
    weights.write(of_adapter(values, json.loads(names.read_text())), home, None, "peft")
    write_run(home, record_of("r-1", job, job.output.to, "", 0))
    wanted_before = plain_text(base, PROMPT)
    wanted = plain_text(peft.PeftModel.from_pretrained(base, home / "adapter"), PROMPT)
    assert wanted != wanted_before
    assert says(speaker(str(home), nobody)) == wanted
    assert says(speaker_before(str(home), nobody)) == wanted_before
    asked = ["sample", str(home), "--before", "--prompt", PROMPT, "--tokens", str(TOKENS)]
    found = CliRunner().invoke(app, asked)
    assert found.stdout == printable_lines(f"before: {wanted_before}\nafter:  {wanted}\n")
    loaded = [line for line in found.stderr.splitlines() if line.startswith("load")]
    assert loaded == [
        "loading the model",
        "loaded the weights that it began with; it answers",
        f"loaded {home / 'adapter'}; it answers",
    ]


@torch.no_grad()
def continued(model: Any, prompt: str, words: Any) -> str:
    """What follows plain text, greedy by hand."""
    ids = words(prompt).input_ids
    said: list[int] = []
    for _ in range(TOKENS):
        said.append(int(model(input_ids=torch.tensor([ids + said])).logits[0, -1].argmax()))
        if said[-1] == words.eos_token_id:
            break
    return str(words.decode(said, skip_special_tokens=True))


@pytest.mark.parametrize("where", ["model.safetensors", "model"])
def test_a_run_of_text_speaks_with_the_tokenizer_of_its_data(tmp_path: Path, where: str) -> None:
    model, words = write_model(tmp_path / "model", "llama"), other_words()
    words.chat_template = tokenizer().chat_template  # of which plain text has no use
    words.save_pretrained(tmp_path / "other")
    data = {"kind": "text", "source": "*.txt", "tokenizer": "other"}
    job, home = job_of(tmp_path, data=data), tmp_path / "runs" / "r-1"
    with torch.no_grad():
        for number, parameter in enumerate(model.parameters()):
            parameter.normal_(0.0, 0.5, generator=torch.Generator().manual_seed(number))
    if where == "model":
        model.save_pretrained(home / "model")
        words.save_pretrained(home / "model")
    else:
        home.mkdir(parents=True)
        weights.write(dict(model.state_dict()), home, None, "safetensors")
    write_run(home, record_of("r-1", job, job.output.to, "", 0))
    wanted = continued(model, PROMPT, words)
    assert wanted != continued(model, PROMPT, tokenizer())
    assert says(speaker(str(home), nobody)) == wanted


@pytest.mark.parametrize("named", ["auto", "words", "bytes"])
def test_text_speaks_by_what_made_its_ids(tmp_path: Path, named: str) -> None:
    model = write_model(tmp_path / "model", "llama")
    tokenizer().save_pretrained(tmp_path / "words")
    data = {"kind": "text", "source": "t.txt", "tokenizer": named, "length": 8}
    job = Job(model={"factory": "hf:model"}, data=data, steps=1, folder=tmp_path)
    home = tmp_path / "runs" / "r-1"
    write_run(home, record_of("r-1", job, job.output.to, "", 0))
    words = tokenizer()
    ids = list(PROMPT.encode()) if named == "bytes" else words(PROMPT).input_ids
    eos = None if named == "bytes" else words.eos_token_id
    said = model.generate(
        input_ids=torch.tensor([ids]), max_new_tokens=TOKENS, do_sample=False, eos_token_id=eos
    )[0, len(ids) :].tolist()
    wanted = (
        bytes(i for i in said if i < 256).decode(errors="replace")
        if named == "bytes"
        else words.decode(said, skip_special_tokens=True)
    )
    assert says(speaker_before(str(home), nobody)) == wanted


@pytest.mark.slow
async def test_a_trained_adapter_speaks_as_peft_has_it(
    lab: Lab,  # noqa: F811
    tmp_path: Path,
) -> None:
    peft = pytest.importorskip("peft")
    base = write_model(tmp_path / "model", "llama")
    write_chats(tmp_path / "chats.jsonl")
    lora = {"r": 4, "lora_alpha": 32, "target_modules": "auto"}
    job = job_of(tmp_path, model={"lora": lora}, output={"format": "peft"})
    home = await trained(lab, job)
    wanted_before = plain_text(base, PROMPT)
    adapted = peft.PeftModel.from_pretrained(base, home / "adapter")
    wanted = plain_text(adapted, PROMPT)
    assert wanted != wanted_before, "it learned something"
    for where in (home, home.parent, home / "adapter"):
        assert says(speaker(str(where), nobody)) == wanted
    assert says(speaker_before(str(home), nobody)) == wanted_before
    assert says(speaker(str(tmp_path / "model"), nobody)) == wanted_before


@pytest.mark.slow
async def test_a_run_speaks_by_id_and_by_its_newest_checkpoint(
    lab: Lab,  # noqa: F811
    tmp_path: Path,
) -> None:
    write_model(tmp_path / "model", "llama")
    write_chats(tmp_path / "chats.jsonl")
    job = job_of(tmp_path, train={"lr": 0.3}, output={"format": "hf", "every": 4})
    home = await trained(lab, job, export=False)

    def asked() -> tuple[str, str]:
        with connect(lab.broker.address) as client:
            one = speaker(home.name, lambda name: client.run(name, home.parent))
            run = client.run(home.name, home.parent)
            return says(one), str(run.export(tmp_path / "merged"))

    text, merged = await asyncio.to_thread(asked)
    wanted = plain_text(AutoModelForCausalLM.from_pretrained(merged), PROMPT)
    assert wanted != plain_text(AutoModelForCausalLM.from_pretrained(tmp_path / "model"), PROMPT)
    assert text == wanted
    (kept,) = home.glob("checkpoint-*")
    assert says(speaker(str(home), nobody)) == wanted
    assert says(speaker(str(kept), nobody)) == wanted
    (home / "run.json").write_text(json.dumps({"run": "r-1", "output": {}}))
    with pytest.raises(RecordError, match="no job of this machine"):
        speaker(str(home), nobody)


def test_the_verb_speaks(tmp_path: Path) -> None:
    model = write_model(tmp_path / "model", "gpt2")
    asked = ["sample", str(tmp_path / "model"), "--prompt", PROMPT, "--tokens", str(TOKENS)]
    found = CliRunner().invoke(app, [*asked, "--json"])
    assert json.loads(found.stdout)["text"] == plain_text(model, PROMPT)
    wanted = plain_text(model, PROMPT, system="Say little.")
    assert wanted != plain_text(model, PROMPT)
    found = CliRunner().invoke(app, [*asked, "--json", "--system", "Say little."])
    assert json.loads(found.stdout)["text"] == wanted
    assert (
        CliRunner().invoke(app, asked).stdout == printable_lines(plain_text(model, PROMPT)) + "\n"
    )


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda folder: folder / "none", "no folder"),
        (lambda folder: folder, r"neither a config\.json nor a run\.json"),
    ],
)
def test_what_does_not_speak_says_why(tmp_path: Path, make: Any, said: str) -> None:
    with pytest.raises(SampleError, match=said):
        speaker(str(make(tmp_path)), nobody)
    found = CliRunner().invoke(app, ["sample", str(make(tmp_path)), "--prompt", "a"])
    assert found.exit_code == WRONG


def test_without_its_broker_a_run_speaks_by_its_folder(tmp_path: Path) -> None:
    (tmp_path / "r-1").mkdir()
    (tmp_path / "r-1" / "run.json").write_text("{}")
    with socket.socket() as nobodys:
        nobodys.bind(("127.0.0.1", 0))  # and nobody listens
        to = ["--to", str(tmp_path), "--broker", f"127.0.0.1:{nobodys.getsockname()[1]}"]
        found = {
            run: CliRunner().invoke(app, ["sample", run, "--prompt", "a", *to])
            for run in ("r-1", "r-2")
        }
    said = f"shoal sample {tmp_path / 'r-1'}"
    assert {run: (f.exit_code, said in f.stderr) for run, f in found.items()} == {
        "r-1": (UNREACHABLE, True),
        "r-2": (UNREACHABLE, False),
    }


def test_a_prompt_that_is_too_long_is_refused(tmp_path: Path) -> None:
    write_model(tmp_path / "model", "gpt2")  # of 128 positions
    with pytest.raises(SampleError, match="takes 128"):
        says(speaker(str(tmp_path / "model"), nobody), "a b " * 200)
