"""Which text the integers in a model's inputs stand for."""

from __future__ import annotations

from typing import Annotated

from pydantic import BeforeValidator, Field, model_validator

from comgra_decl.spec.base import SpecModel
from comgra_decl.spec.nodes import AnnotationName, listed


class TokensSpec(SpecModel):
    """The tokens that the integers in inputs and targets stand for, which the viewer then shows."""

    alphabet: Annotated[str | list[str], Field(min_length=1)] | None = None
    """The tokens in the order of their ids: the characters of a string, or a list of strings."""

    file: Annotated[str, Field(min_length=1)] | None = None
    """A file that contains the tokens, relative to the program's initial working directory:
    `tokenizer.json` as saved by the Hugging Face tokenizers, a JSON mapping of tokens to ids or
    list of tokens, or a text file with one token per line. Its tokens are stored in the run."""

    inputs: Annotated[list[AnnotationName], BeforeValidator(listed)] = ["*"]
    """Globs over the names of the inputs that contain ids of tokens, such as `input_ids`. Only
    inputs and targets of integers are considered, and inputs of embeddings by the names of their
    modules."""

    exclude: Annotated[list[AnnotationName], BeforeValidator(listed)] = [
        "*mask*",
        "*type*",
        "*position*",
        "wpe",
    ]
    """Globs over the names of inputs that contain other integers."""

    @model_validator(mode="after")
    def _has_one_source(self) -> TokensSpec:
        if (self.alphabet is None) == (self.file is None):
            raise ValueError("requires either 'alphabet' or 'file'")
        return self
