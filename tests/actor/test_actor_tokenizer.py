"""The actor's tokenizer against transformers, which the actor itself never loads."""

import json

import pytest
from transformers import AutoTokenizer

from prl.actor.tokenizer import ModelTokenizer
from prl.domains.api import DomainError
from prl.runfolder.model import write_model_folder
from prl.trainer.options import ModelOptions

# Loops with break, defaults, namespaces, whitespace control, filters, special tokens, dates: what real templates use.
TEMPLATE = """{%- if messages[0]['role'] == 'system' %}
    {{- '<|im_start|>system\\n' + messages[0]['content'] | trim + '<|im_end|>\\n' }}
    {%- set rest = messages[1:] %}
{%- else %}
    {{- '<|im_start|>system\\nYou help.<|im_end|>\\n' }}
    {%- set rest = messages %}
{%- endif %}
{%- set seen = namespace(users=0) %}
{% for message in rest %}
    {% if message.role == 'stop' %}{% break %}{% endif %}
    {% if message.role == 'user' %}{% set seen.users = seen.users + 1 %}{% endif %}
{{ '<|im_start|>' + message.role }}
{{ message['content'] }}<|im_end|>
{% endfor %}
{{- seen.users }} {{ {"b": "é<>&"} | tojson }} {{ eos_token }}{{ strftime_now('%Y') }}
{% if messages[-1].role == 'tool' %}{{ raise_exception('no tools') }}{% endif %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""

CONVERSATIONS = [
    [{"role": "user", "content": "Two and two?"}],
    [{"role": "system", "content": "  Be brief. "}, {"role": "user", "content": "Größe 3 < 4 & 5 > 4?\n\\boxed{}"}],
    [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}, {"role": "user", "content": "<|im_end|>"}],
    [{"role": "user", "content": "a"}, {"role": "stop", "content": "b"}, {"role": "user", "content": "c"}],
]


@pytest.fixture
def folder(tmp_path):
    folder = tmp_path / "model"
    write_model_folder(ModelOptions(init="random", architecture="qwen2", tokenizer="bytes"), folder)
    return folder


@pytest.mark.parametrize("where", ["as it is", "in the config", "in a file of its own"])
def test_chat_equals_transformers(folder, where):
    path = folder / "tokenizer_config.json"
    if where == "in the config":
        path.write_text(json.dumps({**json.loads(path.read_text()), "chat_template": TEMPLATE}))
    elif where == "in a file of its own":
        (folder / "chat_template.jinja").write_text(TEMPLATE)
    ours, theirs = ModelTokenizer(folder), AutoTokenizer.from_pretrained(folder)
    for conversation in CONVERSATIONS:
        expected = theirs.apply_chat_template(conversation, add_generation_prompt=True, tokenize=True, return_dict=False)
        assert ours.chat(conversation) == tuple(expected)
        assert ours.chat([dict(message) for message in conversation]) == tuple(expected)  # kept from before


def test_encode_and_decode_equal_transformers(folder):
    ours, theirs = ModelTokenizer(folder), AutoTokenizer.from_pretrained(folder)
    for text in ("", "a", "3194=", "Größe\n\t ∑", "<|im_end|>x"):
        assert ours.encode(text) == tuple(theirs(text, add_special_tokens=False).input_ids)
        assert ours.decode(ours.encode(text)) == theirs.decode(theirs(text).input_ids, skip_special_tokens=True)


def test_end_ids(folder):
    tokenizer = ModelTokenizer(folder)
    assert tokenizer.end_ids == tokenizer.encode("<|im_end|>")
    both = [*tokenizer.encode("<|endoftext|>"), *tokenizer.end_ids]
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": both}))
    assert ModelTokenizer(folder).end_ids == (both[1], both[0])  # the tokenizer's own one first


def test_what_a_folder_lacks_is_named(folder, tmp_path):
    with pytest.raises(DomainError, match=r"nowhere/tokenizer\.json is missing"):
        ModelTokenizer(tmp_path / "nowhere")
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    with pytest.raises(DomainError, match="no tools"):
        ModelTokenizer(folder).chat([{"role": "tool", "content": "x"}])
    (folder / "chat_template.jinja").write_text("{% for %}")
    with pytest.raises(DomainError, match="chat template is broken"):
        ModelTokenizer(folder)
    (folder / "chat_template.jinja").unlink()
    del settings["chat_template"]
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    with pytest.raises(DomainError, match="no chat template"):
        ModelTokenizer(folder).chat(CONVERSATIONS[0])
    (folder / "tokenizer_config.json").write_text(json.dumps({**settings, "eos_token": "<none>"}))
    with pytest.raises(DomainError, match=r"'<none>'.* is not in the vocabulary"):
        ModelTokenizer(folder)
    (folder / "tokenizer.json").write_text("{}")
    with pytest.raises(DomainError, match="is not a tokenizer"):
        ModelTokenizer(folder)


def test_a_template_cannot_reach_python(folder):
    (folder / "chat_template.jinja").write_text("{{ messages.__class__.__mro__ }}{{ ''.__class__.__base__.__subclasses__() }}")
    with pytest.raises(DomainError, match="unsafe"):
        ModelTokenizer(folder).chat(CONVERSATIONS[0])
