"""Formulas of the papers: what a rate of acceptance should give.

Letters as in the papers: `alpha` chance that a draft token is accepted,
`gamma` draft tokens in a row, `c` cost of a draft step over a target's step.
"""


def _check(alpha: float, gamma: int) -> None:
  if not 0 <= alpha <= 1:
    raise ValueError(f"alpha must be in [0, 1], got {alpha}")
  if gamma < 0:
    raise ValueError(f"gamma must be at least 0, got {gamma}")


def expected_tokens(alpha: float, gamma: int) -> float:
  """Returns the tokens of a step: `(1 - alpha^(gamma + 1)) / (1 - alpha)`.

  The token after the last accepted one is counted. At alpha = 1 it is
  `gamma + 1`, the limit.

  Args:
    alpha: chance of acceptance, independent of what came before.
    gamma: draft tokens in a row.

  Raises:
    ValueError: if an argument is out of range.

  Reference: Leviathan et al. 2023, equation 1.
  """
  _check(alpha, gamma)
  # The sum, not the quotient: that loses all digits near alpha = 1.
  return sum(alpha**i for i in range(gamma + 1))


def walltime_factor(alpha: float, gamma: int, c: float) -> float:
  """Returns how many times faster: expected tokens over `gamma c + 1`.

  Args:
    alpha: chance of acceptance.
    gamma: draft tokens in a row.
    c: seconds of one draft step over those of one target step.

  Raises:
    ValueError: if an argument is out of range.

  Reference: Leviathan et al. 2023, theorem 3.8.
  """
  if c < 0:
    raise ValueError(f"c must be at least 0, got {c}")
  return expected_tokens(alpha, gamma) / (gamma * c + 1)


def operations_factor(alpha: float, gamma: int, c_hat: float) -> float:
  """Returns how many times more arithmetic a token takes.

  `(gamma c_hat + gamma + 1)` over the expected tokens.

  Args:
    alpha: chance of acceptance.
    gamma: draft tokens in a row.
    c_hat: operations of the draft for a token over the target's.

  Raises:
    ValueError: if an argument is out of range.

  Reference: Leviathan et al. 2023, theorem 3.11.
  """
  if c_hat < 0:
    raise ValueError(f"c_hat must be at least 0, got {c_hat}")
  return (gamma * c_hat + gamma + 1) / expected_tokens(alpha, gamma)


def optimal_gamma(alpha: float, c: float) -> int:
  """Returns the number of draft tokens with the largest walltime factor.

  The smallest of equals; 0 if drafting does not pay.

  Args:
    alpha: chance of acceptance, below 1.
    c: cost of a draft step, above 0.

  Raises:
    ValueError: if more drafts always pay (`alpha = 1` or `c = 0`).
  """
  _check(alpha, 0)
  if alpha == 1 or c <= 0:
    raise ValueError(
      f"every further draft token pays at alpha {alpha} and c {c}: need "
      f"alpha < 1 and c > 0"
    )
  gamma, now = 0, 1.0
  # One peak: a further token adds alpha^(gamma + 1), ever less, and costs c.
  while (after := walltime_factor(alpha, gamma + 1, c)) > now:
    gamma, now = gamma + 1, after
  return gamma


def lookahead_expected(alpha: float, gamma: int, b: int) -> float:
  """Returns the tokens of a step with `b` guesses of `gamma` tokens each.

  `(gamma + 1) - sum_(i=1..gamma) (1 - alpha^i)^b`: depth i is reached unless
  all guesses fail before it. Equation 1 of Leviathan et al. at b = 1.

  Args:
    alpha: chance that a token of a guess is right, guesses independent.
    gamma: tokens of a guess.
    b: guesses verified together.

  Raises:
    ValueError: if an argument is out of range.

  Reference: Fu et al. 2024, section 4.
  """
  _check(alpha, gamma)
  if b < 0:
    raise ValueError(f"b must be at least 0, got {b}")
  return gamma + 1 - sum((1 - alpha**i) ** b for i in range(1, gamma + 1))


def lookahead_compression(
  alpha: float, gamma: int, b: int, every: float
) -> float:
  """Returns tokens per step if one step in `every` has good guesses.

  `S = (f - 1 + E) / f`, with the paper's f for `every`.

  Args:
    alpha: see `lookahead_expected`.
    gamma: see `lookahead_expected`.
    b: see `lookahead_expected`.
    every: `f`, at least 1.

  Raises:
    ValueError: if an argument is out of range.

  Reference: Fu et al. 2024, section 4.
  """
  if every < 1:
    raise ValueError(f"every must be at least 1, got {every}")
  return (every - 1 + lookahead_expected(alpha, gamma, b)) / every


def lookahead_tokens(window: int, ngram: int, guesses: int) -> int:
  """Returns the tokens of one pass of lookahead: `(W + G) (N - 1)`.

  Reference: Fu et al. 2024, table 1.
  """
  return (window + guesses) * (ngram - 1)
