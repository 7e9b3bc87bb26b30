"""What submission writes for a model from random weights loads with Hugging Face's classes."""

import pytest
import transformers
from tokenizers import Tokenizer

from prl.config.hf_config import VOCABULARIES, read_model_config
from prl.runfolder.model import write_model_folder
from prl.trainer.options import ModelOptions


def write(tmp_path, **options):
    write_model_folder(ModelOptions(init="random", **options), tmp_path / "model")
    return tmp_path / "model"


def test_the_digits_tokenizer(tmp_path):
    folder = write(tmp_path, architecture="qwen2")
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    assert tokenizer.encode("3194=") == [3, 1, 9, 4, 10]
    assert tokenizer.decode([4, 2, 0, 5]) == "4205"
    assert tokenizer.decode([4, 2, 0, 5, 11], skip_special_tokens=True) == "4205"
    assert (tokenizer.vocab_size, len(tokenizer)) == (16, 16)
    assert (tokenizer.eos_token_id, tokenizer.pad_token_id) == (11, 12)
    assert Tokenizer.from_file(str(folder / "tokenizer.json")).encode("0123456789=<eos>x").ids == [*range(12), 13]


def test_the_byte_tokenizer_and_its_chat_template(tmp_path):
    folder = write(tmp_path, architecture="llama", tokenizer="bytes")
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    text = "What is 7 + 5? \u00e9\u4e2d\n\t  x"
    ids = tokenizer.encode(text)
    assert len(ids) == len(text.encode())
    assert tokenizer.decode(ids) == text
    assert len(tokenizer) == 260
    chat = tokenizer.apply_chat_template([{"role": "user", "content": "hi"}], add_generation_prompt=True, tokenize=False)
    assert chat == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    assert tokenizer.encode(chat).count(tokenizer.eos_token_id) == 1


@pytest.mark.parametrize(
    ("architecture", "name", "parameters"),
    [
        # embedding 16 x 64; a layer: q, k, v, o 64 x (64 + 32 + 32 + 64), ff 3 x 64 x 256, norms; biases (qwen2) 64 + 32 + 32
        ("qwen2", "Qwen2ForCausalLM", 16 * 64 + 2 * (64 * 192 + 3 * 64 * 256 + 128 + 128) + 64),
        ("qwen3", "Qwen3ForCausalLM", 16 * 64 + 2 * (64 * 192 + 3 * 64 * 256 + 128 + 64) + 64),
        ("llama", "LlamaForCausalLM", 16 * 64 + 2 * (64 * 192 + 3 * 64 * 256 + 128) + 64),
        ("mistral", "MistralForCausalLM", 16 * 64 + 2 * (64 * 192 + 3 * 64 * 256 + 128) + 64),
        # 8 experts, which a router of 8 x 64 chooses from
        ("qwen3_moe", "Qwen3MoeForCausalLM", 16 * 64 + 2 * (64 * 192 + 8 * (3 * 64 * 64 + 64) + 128 + 64) + 64),
    ],
)
def test_the_config_makes_the_model(tmp_path, architecture, name, parameters):
    folder = write(tmp_path, architecture=architecture)
    config = transformers.AutoConfig.from_pretrained(folder)
    model = transformers.AutoModelForCausalLM.from_config(config)
    assert type(model).__name__ == name
    assert sum(parameter.numel() for parameter in model.parameters()) == parameters
    assert config.rope_parameters["rope_theta"] == 10000.0
    assert config.tie_word_embeddings is True
    assert config.max_position_embeddings == 1024
    assert (config.eos_token_id, config.pad_token_id) == (11, 12)


@pytest.mark.parametrize("tokenizer", sorted(VOCABULARIES))
def test_the_config_has_the_tokenizers_vocabulary(tmp_path, tokenizer):
    folder = write(tmp_path, architecture="qwen2", tokenizer=tokenizer)
    assert read_model_config(folder).vocabulary == Tokenizer.from_file(str(folder / "tokenizer.json")).get_vocab_size()


def test_untied(tmp_path):
    config = transformers.AutoConfig.from_pretrained(write(tmp_path, architecture="qwen3", tied=False))
    model = transformers.AutoModelForCausalLM.from_config(config)
    assert model.lm_head.weight.data_ptr() != model.model.embed_tokens.weight.data_ptr()


def test_a_model_that_lies_somewhere_is_linked(tmp_path):
    (tmp_path / "big").mkdir()
    write_model_folder(ModelOptions(path=str(tmp_path / "big")), tmp_path / "model")
    assert (tmp_path / "model").readlink() == tmp_path / "big"
