"""The mass algebra of realized work (seed 000, "Realized work"; behaviour A1 to A8).

A contributor scales its tensors by its mass, folds sum tensors and masses, the root divides once by the summed mass of
exactly the contributions that it accepted. No fold tier divides.
"""


def gamma_mass(steps: int, gamma: float) -> float:
    """Parameter mass of a rank that did ``steps`` optimizer steps since the last round: ``steps ** gamma``, 0 if idle.

    The branch for no work is the law, not an optimisation: IEEE has ``0 ** 0 == 1`` and ``0 ** -1`` infinite.
    """
    if steps <= 0:
        return 0.0
    if gamma == 1.0:
        return float(steps)
    return float(steps**gamma)


def mover_mass(steps: int) -> float:
    """Buffer mass: movers count alike, idle ranks not at all; gamma never applies."""
    return 1.0 if steps > 0 else 0.0


def is_realized(mass: float) -> bool:
    """Whether a round with this accepted mass has a result; without one receivers keep what they hold."""
    return mass > 0.0
