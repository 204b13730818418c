"""Hash functions of ids: fingerprints of strings, buckets, and the first values of a row.

The values depend on the id, the column and the seed only, neither on the order of ids nor on the
process. So they are the same on every replica.
"""

from __future__ import annotations

import tensorflow as tf

# Steele, Lea, Flood, Fast splittable pseudorandom number generators (2014): the increment of
# SplitMix64, and the multipliers of its finalizer, variant 13 of
# https://zimbry.blogspot.com/2011/09/better-bit-mixing-improving-on.html.
_INCREMENT = 0x9E3779B97F4A7C15
_MULTIPLIERS = (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
_SHIFTS = (30, 27, 31)

_MOST = (1 << 63) - 1
_FRACTION_BITS = 24  # bits of a float32 fraction


def fingerprints(ids: tf.Tensor, seed: int) -> tf.Tensor:
    """int64, of the shape of `ids`: integers unchanged, strings as a keyed hash of 63 bits."""
    if ids.dtype == tf.string:
        return tf.strings.to_hash_bucket_strong(ids, _MOST, key=[seed, _INCREMENT >> 1])
    return tf.cast(ids, tf.int64)


def buckets(ids: tf.Tensor, count: int, seed: int) -> tf.Tensor:
    """int64 [n], the bucket of each id int64 [n], from 0 to `count` - 1."""
    return tf.cast(_mixed(_begun(ids, seed)) % _unsigned(count), tf.int64)


def uniform(ids: tf.Tensor, width: int, seed: int) -> tf.Tensor:
    """float32 [n, width], uniform in [0, 1), for each id int64 [n]."""
    columns = tf.range(1, width + 1, dtype=tf.int64)
    steps = tf.bitcast(columns, tf.uint64) * _unsigned(_INCREMENT)
    bits = _mixed(_mixed(_begun(ids, ~seed))[:, None] + steps[None])
    fraction = tf.bitwise.right_shift(bits, _unsigned(64 - _FRACTION_BITS))
    # the cast goes through int64, whose casts all devices have
    return tf.cast(tf.bitcast(fraction, tf.int64), tf.float32) * 2.0**-_FRACTION_BITS


def _begun(ids: tf.Tensor, seed: int) -> tf.Tensor:
    mixed_seed = _mixed(_unsigned(seed % (1 << 64)) + _unsigned(_INCREMENT))
    return tf.bitwise.bitwise_xor(tf.bitcast(ids, tf.uint64), mixed_seed)


def _mixed(values: tf.Tensor) -> tf.Tensor:
    """A permutation of uint64, each bit of which depends on all bits."""
    for shift, multiplier in zip(_SHIFTS, (*_MULTIPLIERS, None), strict=True):
        shifted = tf.bitwise.right_shift(values, _unsigned(shift))
        values = tf.bitwise.bitwise_xor(values, shifted)
        if multiplier is not None:
            values *= _unsigned(multiplier)
    return values


def _unsigned(value: int) -> tf.Tensor:
    return tf.constant(value, tf.uint64)
