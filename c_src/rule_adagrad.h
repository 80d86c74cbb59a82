/* Adagrad for kernels_simd.h (rule_adam.h says what such a header holds). Its moment is the sum of squares. */

INLINE void adagrad_constants(rule_constants *c, const oc_rounded_scalars *s, int rule) {
    c->reads_master = s->values[ADAGRAD_WEIGHT_DECAY] != 0;
    if (rule == OC_ADAGRAD_OPTAX)
        c->values[ADAGRAD_LR] = v_set(-s->values[ADAGRAD_LR]);
}

/* Returns the gradient with the decay. */
INLINE v32 adagrad_moments(v32 g, v32 p, v32 *sum, const rule_constants *c, int rule) {
    const int torch = rule == OC_ADAGRAD_TORCH;
    const v32 decay = c->values[ADAGRAD_WEIGHT_DECAY];
    if (c->reads_master)
        g = torch ? v_fma(p, decay, g) : v_add(g, v_mul(decay, p));
    *sum = torch ? v_fma(g, g, *sum) : v_add(v_mul(g, g), *sum);
    return g;
}

INLINE v32 adagrad_master(v32 p, const v32 *sum, v32 g, const rule_constants *c, int rule) {
    const v32 lr = c->values[ADAGRAD_LR], eps = c->values[ADAGRAD_EPS];
    if (rule == OC_ADAGRAD_TORCH)
        return v_sub(p, v_div(v_mul(lr, g), v_add(v_sqrt(*sum), eps)));
    v32 inverse = v_div(v_set(1), v_sqrt(v_add(*sum, eps)));
    vmask is_zero = v_equal(v_twice32(v_bits_of(*sum)), v_bits_zero());
    inverse = v_of_bits(v_pick(is_zero, v_bits_zero(), v_bits_of(inverse)));
    return v_add(p, v_mul(lr, v_mul(inverse, g)));
}
