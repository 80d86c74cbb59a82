/* Muon for kernels_simd.h (rule_adam.h says what such a header holds).
 *
 * The first pass keeps the states, and writes the direction of the step in place of the parameter; the device then
 * orthogonalizes it. The second pass has the result as its second moment, and leaves that as it is.
 */

enum { MUON_IS_NESTEROV, MUON_GRADIENT_IS_SMALL, MUON_MOMENTUM_IS_SMALL, MUON_IS_SUM };

INLINE void muon_constants(rule_constants *c, const oc_rounded_scalars *s, int rule) {
    const float of_gradient = s->values[MUON_ONE_MINUS_MOMENTUM], of_momentum = s->values[MUON_MOMENTUM];
    (void)rule;
    c->reads_master = 0;
    c->on[MUON_IS_NESTEROV] = s->values[MUON_NESTEROV] != 0;
    c->on[MUON_GRADIENT_IS_SMALL] = of_gradient < 0.5f;
    c->on[MUON_MOMENTUM_IS_SMALL] = of_momentum < 0.5f;
    c->on[MUON_IS_SUM] = s->values[MUON_ADDS] != 0;
    if (!c->on[MUON_GRADIENT_IS_SMALL])
        c->values[MUON_ONE_MINUS_MOMENTUM] = v_set(of_gradient - 1);
    if (!c->on[MUON_MOMENTUM_IS_SMALL])
        c->values[MUON_MOMENTUM] = v_set(of_momentum - 1);
}

INLINE v32 muon_moments(v32 g, v32 p, v32 *m, const rule_constants *c, int rule) {
    const v32 *k = c->values;
    (void)p, (void)rule;
    *m = v_fma(k[MUON_ONE_MINUS_MOMENTUM], v_sub(g, *m), c->on[MUON_GRADIENT_IS_SMALL] ? *m : g);
    if (!c->on[MUON_IS_NESTEROV])
        return *m;
    return v_fma(k[MUON_MOMENTUM], v_sub(*m, g), c->on[MUON_MOMENTUM_IS_SMALL] ? g : *m);
}

INLINE v32 muon_master(v32 p, const v32 *m, v32 direction, const rule_constants *c, int rule) {
    const v32 *k = c->values;
    if (rule != OC_MUON)
        return direction;
    v32 step = v_fma(m[1], k[MUON_STEP_SIZE], v_mul(p, k[MUON_DECAY]));
    return c->on[MUON_IS_SUM] ? v_add(p, step) : step;
}
