"""Token embeddings on the host, read from the decode weights row by row."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from pdconvert.runtime.weights import DecodeWeights


@dataclass(frozen=True)
class HostEmbedding:
    """The embedding table of a decode folder.

    Attributes:
        weights: the folder's tensors; only the rows that are asked for are read.
        scale: factor on every embedding, where the family has one (Gemma: √H), else 1.0.
        module: path of the table.
    """

    weights: DecodeWeights
    scale: float = 1.0
    module: str = "model.embed_tokens"

    def hidden(self, ids: Sequence[int], tokens: int) -> np.ndarray:
        """Embedded tokens as the graph's `hidden` input.

        Columns after the last token repeat its embedding: an ordinary activation, where zeros would put
        the norms at their epsilon. What they hold does not matter to any real column.

        Args:
            ids: 1 to `tokens` token ids.
            tokens: columns S of the function.

        Returns:
            (1, H, 1, S) fp16: de-quantized and scaled in fp32, rounded once.

        Raises:
            InputError: an id outside the table.
        """
        padded = [*ids, *[ids[-1]] * (tokens - len(ids))]
        rows = self.weights.rows(self.module, padded) * np.float32(self.scale)
        return np.ascontiguousarray(rows.astype(np.float16).T)[None, :, None, :]
