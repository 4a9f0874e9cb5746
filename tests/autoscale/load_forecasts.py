"""Forecasts of the load for snapshots."""

from autoscale.load_forecast import LoadForecast, SeriesForecast


def series(value: float, *, fallback: str | None = None) -> SeriesForecast:
    """The forecast of a series, by a model or, with the reason, by the last value."""
    return SeriesForecast(value=value, last=value, model="ARIMA(0, 1, 1)", fallback=fallback)


def forecast_of(
    requests_per_s: float, input_tokens: float, output_tokens: float, *, fallback: str | None = None
) -> LoadForecast:
    """A forecast of a load for one minute ahead; ``fallback``: why requests are only the last value."""
    return LoadForecast(
        issued_s=1000.0,
        horizon_s=60.0,
        requests_per_s=series(requests_per_s, fallback=fallback),
        input_tokens=series(input_tokens),
        output_tokens=series(output_tokens),
    )
