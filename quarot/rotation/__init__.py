"""Rotations that leave a model's function alone and take the outliers out of its activations (paper, section 4).

* ``spec``, ``hadamard``, ``galois``, ``williamson``: which Hadamard matrices exist, and the cheapest for a width.
* ``sites``: which rotation acts where, as a table that is checked for cancellation.
* ``planning``, ``plan``: sizes and switches in, a :class:`~quarot.rotation.plan.RotationPlan` out; it is saved with the
  model and says which fallbacks were taken.
* ``orthogonal``, ``fold``, ``apply``: the maps, folding them into one weight in float64, and into one decoder layer.
* ``checks``, ``rotate``: every refusal, then :func:`quarot.rotate_model`.
"""
