"""The cases of the campaign, by what goes wrong."""

from tests.campaign.cases import beside, disagreement, endings, places, stores, trainers

__all__ = ["beside", "disagreement", "endings", "places", "stores", "trainers"]
