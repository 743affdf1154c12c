"""What variants of an algorithm add to its loss."""

from apexrl.algorithms.terms.base import Term
from apexrl.algorithms.terms.encoder import EncoderDistance
from apexrl.algorithms.terms.imitation import Imitation

__all__ = ["EncoderDistance", "Imitation", "Term"]
