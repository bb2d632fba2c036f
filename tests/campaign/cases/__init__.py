"""The cases of the campaign, by what goes wrong."""

from tests.campaign.cases import beside, devices, disagreement, endings, places, stores, trainers

__all__ = ["beside", "devices", "disagreement", "endings", "places", "stores", "trainers"]
