/* SGD with momentum for kernels_simd.h (rule_adam.h says what such a header holds). */

enum { SGD_IS_NESTEROV, SGD_IS_FIRST };

INLINE void sgd_constants(rule_constants *c, const oc_rounded_scalars *s, int rule) {
    c->reads_master = s->values[SGD_WEIGHT_DECAY] != 0;
    c->on[SGD_IS_NESTEROV] = s->values[SGD_NESTEROV] != 0;
    c->on[SGD_IS_FIRST] = rule == OC_SGD_TORCH && s->values[SGD_FIRST] != 0;
    c->values[SGD_LR] = v_set(-s->values[SGD_LR]);
}

/* Returns the direction of the step. */
INLINE v32 sgd_moments(v32 g, v32 p, v32 *m, const rule_constants *c, int rule) {
    const int torch = rule == OC_SGD_TORCH;
    const v32 *k = c->values;
    if (c->reads_master)
        g = torch ? v_fma(p, k[SGD_WEIGHT_DECAY], g) : v_add(g, v_mul(k[SGD_WEIGHT_DECAY], p));
    if (!c->n_moments)
        return g;
    if (c->on[SGD_IS_FIRST])
        *m = g;
    else if (torch)
        *m = v_fma(g, k[SGD_ONE_MINUS_DAMPENING], v_mul(*m, k[SGD_MOMENTUM]));
    else
        *m = v_add(g, v_mul(k[SGD_MOMENTUM], *m));
    if (!c->on[SGD_IS_NESTEROV])
        return *m;
    return torch ? v_fma(*m, k[SGD_MOMENTUM], g) : v_add(g, v_mul(k[SGD_MOMENTUM], *m));
}

INLINE v32 sgd_master(v32 p, const v32 *m, v32 direction, const rule_constants *c, int rule) {
    (void)m;
    return rule == OC_SGD_TORCH ? v_fma(direction, c->values[SGD_LR], p)
                                : v_add(p, v_mul(c->values[SGD_LR], direction));
}
