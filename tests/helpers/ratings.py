"""Ratings of films in the shape of MovieLens's, made here. Some users and films are frequent."""

from __future__ import annotations

import numpy as np

GENRES = 19
TASTES = 8
"""User u and film m have tastes u % TASTES and m % TASTES; most ratings are of films to taste."""


def ratings(
    batches: int, size: int, users: int, movies: int, *, seed: int, once: bool = False
) -> dict[str, np.ndarray]:
    """Ratings by a rule that can be learned.

    Args:
        batches: how many, of `size` ratings each.
        users, movies: numbers of them; id k is about as frequent as 1 / (k + 1), as Zipf says.
        once: whether no user and no film occurs twice in a batch.

    Returns:
        With n = batches * size: "user_id" and "movie_id" int64 [n], "genres" float32 [n, GENRES],
        where one to three are 1, and "rating" float32 [n], 0.5 to 5 in halves.
    """
    rng = np.random.default_rng(seed)
    of_films = np.random.default_rng(7)  # the same for any seed
    has: np.ndarray = np.zeros([movies, GENRES], np.float32)
    for column in of_films.integers(0, GENRES, [3, movies]):
        has[np.arange(movies), column] = 1
    liked = of_films.normal(size=GENRES)
    pairs = [_batch(rng, size, users, movies, once) for _ in range(batches)]
    user, movie = np.concatenate(pairs, axis=1)
    score = 2.5 + 1.5 * (user % TASTES == movie % TASTES) + 0.3 * (has @ liked)[movie]
    rating = np.clip(np.round(2 * (score + rng.normal(0, 0.3, len(score)))) / 2, 0.5, 5)
    return {
        "user_id": user,
        "movie_id": movie,
        "genres": has[movie],
        "rating": rating.astype(np.float32),
    }


def _batch(rng: np.random.Generator, size: int, users: int, movies: int, once: bool) -> np.ndarray:
    """int64 [2, size]: users and films."""
    user, movie = _zipf(rng, 32 * size, users), _zipf(rng, 32 * size, movies)
    to_taste = movie // TASTES * TASTES + user % TASTES
    movie = np.where(rng.random(len(movie)) < 0.8, np.minimum(to_taste, movies - 1), movie)
    pairs = np.stack([user, movie])
    if once:
        seen: set[tuple[str, int]] = set()
        kept = []
        for place, (u, m) in enumerate(pairs.T.tolist()):
            if not seen & (new := {("user", u), ("film", m)}):
                seen |= new
                kept.append(place)
        pairs = pairs[:, kept]
    assert pairs.shape[1] >= size, "fewer users or films than a batch has"
    return pairs[:, :size]


def _zipf(rng: np.random.Generator, count: int, most: int) -> np.ndarray:
    chance = 1 / np.arange(1, most + 1)
    return rng.choice(most, count, p=chance / chance.sum())
