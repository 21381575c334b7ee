from .svg import curve_svg as curve_svg
from .timeline import chrome_trace as chrome_trace
from .timeline import timeline_svg as timeline_svg
from .timeline import write_chrome_trace as write_chrome_trace
from .tracer import CATEGORIES as CATEGORIES
from .tracer import NULL_TRACER as NULL_TRACER
from .tracer import Category as Category
from .tracer import Event as Event
from .tracer import Span as Span
from .tracer import Tracer as Tracer
from .tracer import events_from_json as events_from_json
from .tracer import events_to_json as events_to_json

__all__: list[str]
