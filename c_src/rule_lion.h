/* Lion for kernels_simd.h (rule_adam.h says what such a header holds). */

enum { LION_DECAYS };

INLINE void lion_constants(rule_constants *c, const oc_rounded_scalars *s, int rule) {
    (void)rule;
    c->reads_master = 0;
    c->on[LION_DECAYS] = s->values[LION_WEIGHT_DECAY] != 0;
    c->values[LION_LR] = v_set(-s->values[LION_LR]);
}

/* 1 with the sign of x; zeros and NaNs as they are. */
INLINE v32 v_sign(v32 x) {
    vbits bits = v_bits_of(x), one = v_bits_or(v_bits_and(bits, v_bits_set(0x80000000)), v_bits_set(0x3f800000));
    vbits sign = v_pick(v_equal(v_twice32(bits), v_bits_zero()), bits, one);
    return v_of_bits(v_pick(v_ordered(x), sign, bits));
}

/* Returns the sign of the step. */
INLINE v32 lion_moments(v32 g, v32 p, v32 *m, const rule_constants *c, int rule) {
    (void)p, (void)rule;
    const v32 *k = c->values;
    v32 mixed = v_add(v_mul(k[LION_BETA1], *m), v_mul(k[LION_ONE_MINUS_BETA1], g));
    *m = v_add(v_mul(k[LION_BETA2], *m), v_mul(k[LION_ONE_MINUS_BETA2], g));
    return v_sign(mixed);
}

INLINE v32 lion_master(v32 p, const v32 *m, v32 step, const rule_constants *c, int rule) {
    (void)m, (void)rule;
    if (c->on[LION_DECAYS])
        step = v_add(step, v_mul(c->values[LION_WEIGHT_DECAY], p));
    return v_add(p, v_mul(c->values[LION_LR], step));
}
