"""The cases of the campaign, by what goes wrong."""

from tests.campaign.cases import beside, deciding, devices, disagreement, endings, outside, places, stores, trainers

__all__ = ["beside", "deciding", "devices", "disagreement", "endings", "outside", "places", "stores", "trainers"]
