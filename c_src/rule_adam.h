/* Adam and AdamW for kernels_simd.h.
 *
 * The header of a rule NAME defines three functions. `rule` is a constant in all of them.
 *
 * NAME_constants(c, s, rule) sets what c holds beside the rounded scalars.
 *
 * NAME_moments(g, p, m, c, rule) is the first half of an element's update. It writes the new moments to m, and reads p
 * only if c->reads_master. The second half gets what it returns.
 *
 * NAME_master(p, m, carry, c, rule) is the second half. It returns the new master.
 *
 * All operations are those of the definition in docs/numerics.md, in its order.
 */

enum { ADAM_IS_DECOUPLED, ADAM_HAS_SMALL_W1 };

INLINE void adam_constants(rule_constants *c, const oc_rounded_scalars *s, int rule) {
    const int torch = rule == OC_ADAM_TORCH;
    const float w1 = s->values[ADAM_ONE_MINUS_BETA1];
    c->reads_master = s->values[ADAM_L2] != 0;
    c->on[ADAM_IS_DECOUPLED] = torch ? s->values[ADAM_DECAY] != 1 : s->values[ADAM_WEIGHT_DECAY] != 0;
    c->on[ADAM_HAS_SMALL_W1] = w1 < 0.5f;
    if (torch && !c->on[ADAM_HAS_SMALL_W1])
        c->values[ADAM_ONE_MINUS_BETA1] = v_set(w1 - 1);
}

INLINE v32 adam_moments(v32 g, v32 p, v32 *moments, const rule_constants *c, int rule) {
    const v32 m = moments[0], v = moments[1], *k = c->values;
    if (rule == OC_ADAM_TORCH) {
        if (c->reads_master)
            g = v_fma(p, k[ADAM_L2], g);
        v32 difference = v_sub(g, m);
        moments[0] = v_fma(k[ADAM_ONE_MINUS_BETA1], difference, c->on[ADAM_HAS_SMALL_W1] ? m : g);
        moments[1] = v_fma(v_mul(k[ADAM_ONE_MINUS_BETA2], g), g, v_mul(v, k[ADAM_BETA2]));
        return v_sqrt(moments[1]);
    }
    if (c->reads_master)
        g = v_add(g, v_mul(k[ADAM_L2], p));
    moments[0] = v_add(v_mul(k[ADAM_ONE_MINUS_BETA1], g), v_mul(k[ADAM_BETA1], m));
    moments[1] = v_add(v_mul(k[ADAM_ONE_MINUS_BETA2], v_mul(g, g)), v_mul(k[ADAM_BETA2], v));
    return v_sqrt(v_add(v_div(moments[1], k[ADAM_CORRECTION2]), k[ADAM_EPS_ROOT]));
}

INLINE v32 adam_master(v32 p, const v32 *moments, v32 root, const rule_constants *c, int rule) {
    const v32 *k = c->values;
    if (rule == OC_ADAM_TORCH) {
        if (c->on[ADAM_IS_DECOUPLED])
            p = v_mul(p, k[ADAM_DECAY]);
        v32 denominator = v_add(v_div(root, k[ADAM_CORRECTION2]), k[ADAM_EPS]);
        return v_add(p, v_div(v_mul(k[ADAM_STEP_SIZE], moments[0]), denominator));
    }
    v32 update = v_div(v_div(moments[0], k[ADAM_CORRECTION1]), v_add(root, k[ADAM_EPS]));
    if (c->on[ADAM_IS_DECOUPLED])
        update = v_add(update, v_mul(k[ADAM_WEIGHT_DECAY], p));
    return v_add(p, v_mul(update, k[ADAM_STEP_SIZE]));
}
