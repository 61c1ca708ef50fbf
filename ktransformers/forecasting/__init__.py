"""Memory, speed and numerics of a model with its rules on this machine, told before a weight is read."""

from ktransformers.forecasting.compose import forecast
from ktransformers.forecasting.result import Forecast, Holding

__all__ = ["Forecast", "Holding", "forecast"]
