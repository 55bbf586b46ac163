"""Small tokenizers, trained on the spot with the libraries that read them."""

import io
from pathlib import Path

SENTENCES = [
    "The quick brown fox jumps over the lazy dog.",
    "Position states are updated by every layer.",
    "def encode(self, text): return self.tokens[text]",
    "Grün ist die Wiese, blau der Himmel.",
] * 5


def hugging_face(
    path: Path, specials=("<s>", "</s>", "<pad>"), vocab_size=300, *, starts=True
) -> Path:
    """A byte-level BPE ``tokenizer.json``, perhaps with a post-processor that would add ``<s>``."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(specials),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(SENTENCES, trainer)
    if starts and "<s>" in specials:
        tokenizer.post_processor = processors.TemplateProcessing(
            single="<s> $A", special_tokens=[("<s>", tokenizer.token_to_id("<s>"))]
        )
    tokenizer.enable_truncation(4)
    tokenizer.save(str(path))
    return path


def sentencepiece_model(path: Path) -> Path:
    """A BPE ``.model`` like Llama's: bytes for what is unknown, no normalisation."""
    import sentencepiece

    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(SENTENCES),
        model_writer=model,
        model_type="bpe",
        vocab_size=320,
        byte_fallback=True,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        minloglevel=2,
    )
    path.write_bytes(model.getvalue())
    return path
