"""The weights of every drafter, defined once for the trainer and the server."""

from .backbone import DFlashBackbone
from .draft import Draft
from .heads import BlockStates, DFlashHead, LiLiCorrHead, Proposal, TargetVocabulary
from .lattice import top_candidates, walk

__all__ = [
    "BlockStates",
    "DFlashBackbone",
    "DFlashHead",
    "Draft",
    "LiLiCorrHead",
    "Proposal",
    "TargetVocabulary",
    "top_candidates",
    "walk",
]
