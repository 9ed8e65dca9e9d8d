"""Cross entropy of `hidden @ weight.T` for one rank's rows of the vocabulary, logits never whole.

Imports torch and kernels.wide_product. Nothing here communicates: each method returns what this
rank's rows give, and `core.tensor_parallel.output_loss` puts the ranks' parts together.
`TorchLogits` below runs on CPUs and is the reference of `kernels.linear_cross_entropy_triton`,
which has the same methods.

With z_ij the logit of token i and vocabulary entry j, softcapped if asked for (z = c tanh(x / c)),
V the real vocabulary, eps the label smoothing (torch's definition: eps / V on every class), y_i the
target, w_i the token's weight and lambda the z-loss coefficient:

    lse_i  = log sum_j exp z_ij                                      over all ranks
    q_ij   = (1 - eps) [j = y_i] + eps / V                           the smoothed target
    loss_i = lse_i - sum_j q_ij z_ij + lambda lse_i^2
    H_i    = lse_i - sum_j p_ij z_ij, p_ij = exp(z_ij - lse_i)       the entropy

    d loss_i / d z_ij = p_ij (1 + 2 lambda lse_i) - q_ij
    d H_i    / d z_ij = -p_ij (H_i + z_ij - lse_i)
    d z / d x         = 1 - (z / c)^2

What leaves a rank is one or two numbers per token: its own log-sum-exp and its part of sum_j q z.
The sums over ranks lose nothing: lse = logsumexp over ranks of the local ones.

Read in this order: `LossTerms`, `TokenStats`, `TokenGradient`, `TorchLogits`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.wide_product import add_product

UPCAST_BYTES = 4 << 20  # weight rows that are cast to the accumulation type at once
TILE_BYTES = 8 << 20  # logits that exist at once where they are recomputed
BLOCK_BYTES = 2 << 20  # rows of logits that go through all steps together, in a core's cache
PRODUCT_COLUMNS = 8192  # of logits: a CPU's product makes a copy of all its weight rows
PLAIN_SUMS = 1e-16, 1e24  # sums of exp z, nothing subtracted, that lose nothing in float32


@dataclass(frozen=True)
class LossTerms:
    """What shapes the loss besides the logits.

    vocab_size       V, entries of the real vocabulary over all ranks
    label_smoothing  eps in [0, 1)
    z_loss           lambda
    softcap          c, or None
    """

    vocab_size: int
    label_smoothing: float = 0.0
    z_loss: float = 0.0
    softcap: float | None = None


@dataclass(frozen=True)
class TokenStats:
    """One rank's share of n tokens, every tensor [n] in the accumulation type.

    lse     log sum exp over my rows; -inf if I have none
    score   my part of sum_j q_ij z_ij
    target  the target's logit if it is mine, else 0
    top     my largest logit; `exponentials` may do without
    mean    sum_j exp(z_ij - lse) z_ij over my rows, only when the entropy is wanted
    """

    lse: Tensor
    score: Tensor
    target: Tensor
    top: Tensor | None = None
    mean: Tensor | None = None


@dataclass(frozen=True)
class TokenGradient:
    """What turns the logits of n tokens into their gradient, every tensor [n].

    lse             over all ranks
    weight          gradient of the token's loss (its weight times what comes from above)
    entropy         the token's entropy, and
    entropy_weight  gradient of that entropy, when the entropy was used
    """

    lse: Tensor
    weight: Tensor
    entropy: Tensor | None = None
    entropy_weight: Tensor | None = None

    def map(self, cut: Callable[[Tensor], Tensor]) -> TokenGradient:
        """The same of some of the tokens."""
        every = (self.lse, self.weight, self.entropy, self.entropy_weight)
        return TokenGradient(*(None if vector is None else cut(vector) for vector in every))

    def factors(self, terms: LossTerms) -> tuple[Tensor, Tensor, Tensor | None]:
        """a, b, c of d loss / d z_ij = a_i p_ij - b_i [j = y_i] - c_i; c is None if all zero."""
        a = self.weight
        if terms.z_loss:
            a = a * (1 + 2 * terms.z_loss * self.lse)
        if not terms.label_smoothing:
            return a, self.weight, None
        b = self.weight * (1 - terms.label_smoothing)
        return a, b, self.weight * (terms.label_smoothing / terms.vocab_size)


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """Logits, softmax and gradient sums of `dtype` operands are kept in this type."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def local_target(target: Tensor, start: int, rows: int, ignore_index: int | None) -> Tensor:
    """My row of each target, or -1 where it is another rank's or ignored.  [n] int64, both"""
    mine = target - start
    keep = (mine >= 0) & (mine < rows)
    if ignore_index is not None:
        keep &= target != ignore_index
    return torch.where(keep, mine, -1)


@dataclass
class Slot:
    """Memory for the logits of one chunk of tokens between the two halves of its work.

    memory  flat, `rows x columns` at most; holds exp(z - shift), or z under a softcap
    shift   [n] what was subtracted, set by the first half
    """

    memory: Tensor
    shift: Tensor | None = None

    def matrix(self, rows: int, columns: int) -> Tensor:
        return self.memory[: rows * columns].view(rows, columns)


class TorchLogits:
    """Logits of my rows of the vocabulary, in chunks of tokens and tiles of columns.

    weight  [v, h]  my rows, padding rows left out
    bias    [v] or None

    Low-precision operands: on a CPU tiles of the weight are cast up, since its low-precision
    products round the logits to bf16 (an error of 6 % of p at a logit of 20) and are slow without
    bf16 units; on a GPU the product is asked for in float32.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None, terms: LossTerms) -> None:
        self.weight = weight.detach()
        self.dtype = accumulation_dtype(weight.dtype)
        self.bias = None if bias is None else bias.detach().to(self.dtype)
        self.terms = terms
        self.rows, self.hidden_size = weight.shape
        self.operand_dtype = weight.dtype if weight.is_cuda else self.dtype
        self.smallest = torch.finfo(self.dtype).min
        # On a CPU exp(z) is tried first: to know and subtract the largest logit takes two passes.
        # Likewise a token's factor goes to the products' other operand, and p is never formed.
        self.plain = terms.softcap is None and not weight.is_cuda
        self.tile_bytes = 32 * TILE_BYTES if weight.is_cuda else TILE_BYTES

    # ---- forward alone ------------------------------------------------------------------------

    def statistics(self, hidden: Tensor, target: Tensor, *, entropy: bool = False) -> TokenStats:
        """Online over tiles of columns: no more than TILE_BYTES of logits exist.

        hidden [n, h]    target [n] from `local_target`
        """
        hidden = hidden.to(self.operand_dtype)
        n = len(hidden)
        top, total = self._vector(n, self.smallest), self._vector(n, 0)
        found, linear, spread = (self._vector(n, 0) for _ in range(3))
        for start, stop, tile in self._tiles(n):
            logits = self._logits_into(tile, hidden, start, stop)
            found += _at_target(logits, target, start)
            if self.terms.label_smoothing:
                linear += logits.sum(1)
            if entropy:  # the logits are needed once more below
                shifted = logits.clone()
            higher, sums = self._exponentials_(logits, top)
            step = top - higher  # 0 or less
            shrink = step.exp()
            if entropy:  # sum of (z - top) exp(z - top); a move of top by step moves every term
                shifted.sub_(higher.unsqueeze(1))
                spread = shrink * (spread + step * total) + shifted.mul_(logits).sum(1)
            total = total * shrink + sums
            top = higher
        lse = top + total.log()
        mean = torch.where(total > 0, top + spread / total, 0) if entropy else None
        return TokenStats(lse, self._score(found, linear), found, top, mean)

    # ---- both halves of a chunk whose gradient is formed in forward ---------------------------

    def slot(self, tokens: int) -> Slot:
        return Slot(torch.empty(tokens * self.rows, dtype=self.dtype, device=self.weight.device))

    def exponentials(self, hidden: Tensor, target: Tensor, slot: Slot) -> TokenStats:
        """First half: the chunk's statistics; its exponentials stay in the slot."""
        n = len(hidden)
        if not self.rows:
            stats = self.statistics(hidden, target)
            slot.shift = stats.top
            return stats
        logits = slot.matrix(n, self.rows)
        self._logits_into(logits, hidden.to(self.operand_dtype), 0, self.rows)
        found = _at_target(logits, target, 0)
        linear = logits.sum(1) if self.terms.label_smoothing else None
        plain = self._plain_exponentials_(logits, hidden) if self.plain else None
        top = self._vector(n, self.smallest)
        if plain is not None:
            slot.shift = torch.zeros_like(plain)
            return TokenStats(plain.log(), self._score(found, linear), found)
        if self.terms.softcap is None:
            top, total = self._exponentials_(logits, top)
        else:  # the slot keeps z, which the softcap's derivative needs
            total = torch.empty_like(top)
            for i, j, part in self._row_blocks(logits):
                top[i:j], total[i:j] = self._exponentials_(part.clone(), top[i:j])
        slot.shift = top
        return TokenStats(top + total.log(), self._score(found, linear), found, top)

    def gradient(
        self,
        slot: Slot,
        hidden: Tensor,
        target: Tensor,
        tokens: TokenGradient,
        *,
        dhidden: Tensor | None,
        dweight: Tensor | None,
        dbias: Tensor | None,
        fresh: bool = False,
    ) -> None:
        """Second half: writes dhidden [n, h], adds to dweight [v, h] and dbias [v] where wanted.

        fresh: dweight holds nothing yet, and is written.
        """
        if not self.rows:
            if dhidden is not None:
                dhidden.zero_()
            return
        hidden = hidden.to(self.operand_dtype)
        logits = slot.matrix(len(hidden), self.rows)
        summed = self._zero_sum(dhidden)
        if self.terms.softcap is None:
            a, b, c = tokens.factors(self.terms)
            a = a * (slot.shift - tokens.lse).exp()
            if self.plain and c is None:
                whole = 0, self.rows
                into = summed, dweight, dbias, fresh
                self._add_scaled_products(logits, hidden, *whole, a, *into)
                self._finish_scaled(hidden, target, a, b, summed, dweight, dbias)
                return self._store(dhidden, summed)
            self._finish_gradient_(logits, target, 0, a, b, c)
        else:
            self._gradient_of_logits_(logits, target, 0, tokens)
        self._add_products(logits, hidden, 0, self.rows, summed, dweight, dbias, fresh)
        return self._store(dhidden, summed)

    # ---- gradient by computing the logits again -----------------------------------------------

    def recomputed_gradient(
        self,
        hidden: Tensor,
        target: Tensor,
        tokens: TokenGradient,
        *,
        dhidden: Tensor | None,
        dweight: Tensor | None,
        dbias: Tensor | None,
        fresh: bool = False,
    ) -> None:
        """As `gradient`, tile by tile, with nothing kept from forward but the log-sum-exp."""
        if not self.rows:
            if dhidden is not None:
                dhidden.zero_()
            return
        hidden = hidden.to(self.operand_dtype)
        summed = self._zero_sum(dhidden)
        into = summed, dweight, dbias, fresh
        a, b, c = tokens.factors(self.terms)
        scaled = self.plain and c is None and tokens.entropy is None
        for start, stop, tile in self._tiles(len(hidden)):
            logits = self._logits_into(tile, hidden, start, stop)
            if scaled:
                for i, j, z in self._row_blocks(logits):
                    z.sub_(tokens.lse[i:j, None]).exp_()
                self._add_scaled_products(logits, hidden, start, stop, a, *into)
            else:
                self._gradient_of_logits_(logits, target, start, tokens)
                self._add_products(logits, hidden, start, stop, *into)
        if scaled:
            self._finish_scaled(hidden, target, a, b, summed, dweight, dbias)
        return self._store(dhidden, summed)

    # ---- pieces -------------------------------------------------------------------------------

    def _vector(self, n: int, value: float) -> Tensor:
        return torch.full((n,), value, dtype=self.dtype, device=self.weight.device)

    def _score(self, found: Tensor, linear: Tensor | None) -> Tensor:
        """sum_j q_ij z_ij over my rows."""
        eps = self.terms.label_smoothing
        if not eps:
            return found
        return (1 - eps) * found + (eps / self.terms.vocab_size) * linear

    def _tiles(self, n: int) -> Iterator[tuple[int, int, Tensor]]:
        """(first column, last + 1, memory for [n, columns] logits)"""
        columns = max(1, min(self.rows, self.tile_bytes // (max(n, 1) * self.dtype.itemsize)))
        memory = torch.empty(n * columns, dtype=self.dtype, device=self.weight.device)
        for start in range(0, self.rows, columns):
            stop = min(start + columns, self.rows)
            yield start, stop, memory[: n * (stop - start)].view(n, stop - start)

    def _weight_tiles(
        self, start: int, stop: int, most: int | None = None
    ) -> Iterator[tuple[int, int, Tensor]]:
        """Rows start … stop of the weight in the operand type, a bounded copy at a time."""
        step = stop - start if most is None or self.weight.is_cuda else most
        if self.weight.dtype != self.operand_dtype:
            step = max(64, UPCAST_BYTES // (self.hidden_size * self.operand_dtype.itemsize))
        for i in range(start, stop, step):
            j = min(i + step, stop)
            yield i, j, self.weight[i:j].to(self.operand_dtype)

    def _logits_into(self, out: Tensor, hidden: Tensor, start: int, stop: int) -> Tensor:
        """out [n, stop - start] = z of these columns"""
        for i, j, rows in self._weight_tiles(start, stop, PRODUCT_COLUMNS):
            _multiply(hidden, rows.t(), out[:, i - start : j - start])
        if self.bias is not None:
            out.add_(self.bias[start:stop])
        if self.terms.softcap is not None:
            out.div_(self.terms.softcap).tanh_().mul_(self.terms.softcap)
        return out

    def _exponentials_(self, logits: Tensor, top: Tensor) -> tuple[Tensor, Tensor]:
        """logits become exp(logits - higher); returns higher, the larger of top and the row's
        largest, and the sums of rows."""
        higher, total = torch.empty_like(top), torch.empty_like(top)
        for i, j, part in self._row_blocks(logits):
            torch.maximum(top[i:j], part.amax(1), out=higher[i:j])
            torch.sum(part.sub_(higher[i:j, None]).exp_(), 1, out=total[i:j])
        return higher, total

    def _plain_exponentials_(self, logits: Tensor, hidden: Tensor) -> Tensor | None:
        """logits become exp(logits), and the sums of rows are returned: if those are within
        PLAIN_SUMS. If not, logits are made again, None is returned, and this is not tried again."""
        total = self._vector(len(logits), 1)
        for i, j, part in self._row_blocks(logits):
            torch.sum(part.exp_(), 1, out=total[i:j])
            if i == 0 and not _within(total[:j], PLAIN_SUMS):
                break
        if _within(total, PLAIN_SUMS):
            return total
        self.plain = False
        self._logits_into(logits[:j], hidden[:j].to(self.operand_dtype), 0, self.rows)
        return None

    def _row_blocks(self, logits: Tensor) -> Iterator[tuple[int, int, Tensor]]:
        """Blocks of whole rows that a core's cache holds; a GPU takes all at once."""
        step = len(logits)
        if not logits.is_cuda:
            step = max(1, BLOCK_BYTES // (logits.shape[1] * self.dtype.itemsize))
        for i in range(0, len(logits), max(step, 1)):
            j = min(i + step, len(logits))
            yield i, j, logits[i:j]

    def _gradient_of_logits_(
        self, logits: Tensor, target: Tensor, start: int, tokens: TokenGradient
    ) -> None:
        """z of columns start … becomes the gradient with respect to x = h w + bias, in place."""
        cap = self.terms.softcap
        for i, j, z in self._row_blocks(logits):
            rows = tokens.map(lambda vector, i=i, j=j: vector[i:j])
            a, b, c = rows.factors(self.terms)
            slope = None if cap is None else 1 - (z / cap).square_()
            z.sub_(rows.lse.unsqueeze(1))
            if rows.entropy_weight is None:
                z.exp_()
            else:  # a p - e p (H + z - lse)
                weight = rows.entropy_weight
                a = torch.addcmul(a, weight, rows.entropy, value=-1)
                shape = torch.addcmul(a[:, None], weight[:, None], z, value=-1)
                z.exp_().mul_(shape)
                a = None
            self._finish_gradient_(z, target[i:j], start, a, b, c)
            if slope is not None:
                z.mul_(slope)

    @staticmethod
    def _finish_gradient_(
        p: Tensor, target: Tensor, start: int, a: Tensor | None, b: Tensor, c: Tensor | None
    ) -> None:
        """p becomes a p - c - b [j = y]; a is None where p carries it already."""
        if a is not None:
            p.mul_(a.unsqueeze(1))
        if c is not None:
            p.sub_(c.unsqueeze(1))
        mine, columns = _columns_of(target, start, p.shape[1])
        p.scatter_add_(1, columns.unsqueeze(1), torch.where(mine, -b, 0).unsqueeze(1))

    def _add_scaled_products(
        self, e: Tensor, hidden: Tensor, start: int, stop: int, a: Tensor,
        dhidden, dweight, dbias, fresh,
    ) -> None:  # fmt: skip
        """What the part a e of the gradient, e [n, stop - start], gives: dweight += e' (a hidden),
        dhidden += e weight, which lacks its factor a, dbias += e' a."""
        if dbias is not None:
            dbias[start:stop].addmv_(e.t(), a)
        self._add_products(e, hidden * a[:, None], start, stop, dhidden, dweight, None, fresh)

    def _finish_scaled(
        self, hidden: Tensor, target: Tensor, a: Tensor, b: Tensor, dhidden, dweight, dbias
    ) -> None:
        """After all columns: the factor a of dhidden, and the part -b [j = y] of the gradient."""
        mine, columns = _columns_of(target, 0, self.rows)
        minus_b = torch.where(mine, -b, 0)
        if dhidden is not None:
            dhidden.mul_(a[:, None])
            rows = self.weight.index_select(0, columns).to(self.dtype)
            dhidden.addcmul_(rows, minus_b[:, None])
        if dweight is not None:
            dweight.index_add_(0, columns, hidden * minus_b[:, None])
        if dbias is not None:
            dbias.index_add_(0, columns, minus_b)

    @staticmethod
    def _store(dhidden: Tensor | None, summed: Tensor | None) -> None:
        if summed is not dhidden:
            dhidden.copy_(summed)

    def _zero_sum(self, dhidden: Tensor | None) -> Tensor | None:
        """dhidden itself, or what its parts are added up in when its own type is too narrow."""
        if dhidden is None or dhidden.dtype == self.dtype:
            return dhidden if dhidden is None else dhidden.zero_()
        return torch.zeros_like(dhidden, dtype=self.dtype)

    def _add_products(
        self, gradient: Tensor, hidden: Tensor, start: int, stop: int,
        dhidden: Tensor | None, dweight: Tensor | None, dbias: Tensor | None, fresh: bool,
    ) -> None:  # fmt: skip
        """A linear layer's backward for columns start … stop, added to sums of the wide type."""
        if dbias is not None:
            dbias[start:stop] += gradient.sum(0)
        gradient = gradient.to(self.operand_dtype)
        if dweight is not None:
            add_product(dweight[start:stop], gradient.t(), hidden, fresh)
        if dhidden is not None:
            for i, j, rows in self._weight_tiles(start, stop):
                add_product(dhidden, gradient[:, i - start : j - start], rows)


def _columns_of(target: Tensor, start: int, columns: int) -> tuple[Tensor, Tensor]:
    """(is it one of these columns, its column or 0), each [n]"""
    column = target - start
    mine = (column >= 0) & (column < columns)
    return mine, torch.where(mine, column, 0)


def _within(x: Tensor, limits: tuple[float, float]) -> bool:
    """Whether all are; not a number never is."""
    low, high = limits
    return bool(((x > low) & (x < high)).all())


def _at_target(logits: Tensor, target: Tensor, start: int) -> Tensor:
    """The logit of the target where it is one of these columns, else 0.  [n, columns] -> [n]"""
    mine, columns = _columns_of(target, start, logits.shape[1])
    return torch.where(mine, logits.gather(1, columns.unsqueeze(1)).squeeze(1), 0)


def _multiply(a: Tensor, b: Tensor, out: Tensor) -> None:
    """out = a @ b; operands of a lower type than out are products of a GPU."""
    if a.dtype == out.dtype:
        torch.mm(a, b, out=out)
    else:
        out.copy_(torch.mm(a, b, out_dtype=out.dtype))
