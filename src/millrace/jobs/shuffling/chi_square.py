"""The probability of a chi-square, by the incomplete gamma function.

The series and the continued fraction are 6.5.29 and 6.5.31 of Abramowitz and Stegun, "Handbook of
Mathematical Functions". Nine digits hold for up to 200,000 degrees of freedom.
"""

from __future__ import annotations

import math


def chi_square_p(value: float, degrees: int) -> float:
    """The probability that a chi-square is at least `value`; 1 without degrees of freedom."""
    return gamma_q(degrees / 2, value / 2) if degrees > 0 else 1.0


def gamma_p(a: float, x: float) -> float:
    """The regularised lower incomplete gamma function P(a, x), for a > 0 and x >= 0."""
    return _series(a, x) if x < a + 1 else 1 - _fraction(a, x)


def gamma_q(a: float, x: float) -> float:
    """The regularised upper incomplete gamma function Q(a, x) = 1 - P(a, x)."""
    return 1 - _series(a, x) if x < a + 1 else _fraction(a, x)


def _series(a: float, x: float) -> float:
    """P(a, x) as the sum of x**n / (a (a + 1) ... (a + n)), times x**a exp(-x) / gamma(a)."""
    if x <= 0:
        return 0.0
    term = total = 1 / a
    n = 0
    while term > total * 1e-17:
        n += 1
        term *= x / (a + n)
        total += term
    return min(total * _scale(a, x), 1.0)


def _fraction(a: float, x: float) -> float:
    """Q(a, x) as a continued fraction, by Lentz's method."""
    b = x + 1 - a
    d = 1 / b
    c, value, n = 1e300, d, 0
    while True:
        n += 1
        b += 2
        factor = n * (a - n)
        d = 1 / (factor * d + b)
        c = b + factor / c
        value *= c * d
        if abs(c * d - 1) < 1e-15:
            return min(value * _scale(a, x), 1.0)


def _scale(a: float, x: float) -> float:
    """x**a exp(-x) / gamma(a)."""
    return math.exp(a * math.log(x) - x - math.lgamma(a))
