"""Whether one worker serves a request or two do, one its prompt and one its output: the price (`price`), the bookings
of both halves (`halves`), and how a request is placed (`placing`)."""
