/* The update rules: their scalars and their moments. docs/numerics.md defines their arithmetic.
 *
 * A rule has a function in arithmetic.h (the oracle), a header for the vectors (rule_adam.h describes one), the
 * order of its scalars here, and a line in the list.
 */
#ifndef OC_RULES_H
#define OC_RULES_H

#include "offload_core.h"

/* oc_scalars.values of Adam. */
enum {
    ADAM_L2,           /* the factor of the parameter in the gradient; 0: none */
    ADAM_WEIGHT_DECAY, /* optax: the decoupled factor; 0: none */
    ADAM_DECAY,        /* torch: 1 - lr * weight_decay; 1: none */
    ADAM_BETA1,
    ADAM_BETA2,
    ADAM_ONE_MINUS_BETA1,
    ADAM_ONE_MINUS_BETA2,
    ADAM_CORRECTION1, /* optax: 1 - beta1^t */
    ADAM_CORRECTION2, /* optax: 1 - beta2^t; torch: sqrt(1 - beta2^t) */
    ADAM_EPS,
    ADAM_EPS_ROOT,  /* optax */
    ADAM_STEP_SIZE, /* optax: -lr; torch: -lr / (1 - beta1^t) */
};

/* oc_scalars.values of SGD. */
enum {
    SGD_LR,
    SGD_MOMENTUM,
    SGD_ONE_MINUS_DAMPENING, /* torch */
    SGD_WEIGHT_DECAY,        /* the factor of the parameter in the gradient; 0: none */
    SGD_NESTEROV,            /* 1 or 0 */
    SGD_FIRST,               /* torch: 1 in the parameter's first update, else 0 */
};

/* oc_scalars.values of Lion. */
enum {
    LION_LR,
    LION_BETA1,
    LION_ONE_MINUS_BETA1,
    LION_BETA2,
    LION_ONE_MINUS_BETA2,
    LION_WEIGHT_DECAY, /* the decoupled factor; 0: none */
};

/* oc_scalars.values of Adagrad. */
enum {
    ADAGRAD_LR, /* torch: decayed by the number of updates */
    ADAGRAD_EPS,
    ADAGRAD_WEIGHT_DECAY, /* the factor of the parameter in the gradient; 0: none */
};

/* oc_scalars.values of Muon, in both of its passes. */
enum {
    MUON_MOMENTUM,
    MUON_ONE_MINUS_MOMENTUM,
    MUON_NESTEROV,  /* 1 or 0 */
    MUON_DECAY,     /* torch: 1 - lr * weight_decay; optax: -lr * weight_decay */
    MUON_STEP_SIZE, /* -lr, adjusted to the shape of the matrix */
    MUON_ADDS,      /* optax: 1, the step is a number that is added to the parameter; torch: 0 */
};

/* For each rule: the name of its functions, its number of moments, the scalar that is 0 if it has none of them (or
 * OC_ALWAYS), and a bit for each moment that has a sign, the lowest for the first. The vector kernels have a function
 * of an elementwise rule for each common pair of types and formats. Muon's passes have few: a device does their work.
 */
#define OC_EACH_ELEMENTWISE_RULE(DO)                                                                                   \
    DO(OC_ADAM_TORCH, adam, 2, OC_ALWAYS, 1)                                                                           \
    DO(OC_ADAM_OPTAX, adam, 2, OC_ALWAYS, 1)                                                                           \
    DO(OC_SGD_TORCH, sgd, 1, SGD_MOMENTUM, 1)                                                                          \
    DO(OC_SGD_OPTAX, sgd, 1, SGD_MOMENTUM, 1)                                                                          \
    DO(OC_LION, lion, 1, OC_ALWAYS, 1)                                                                                 \
    DO(OC_ADAGRAD_TORCH, adagrad, 1, OC_ALWAYS, 0)                                                                     \
    DO(OC_ADAGRAD_OPTAX, adagrad, 1, OC_ALWAYS, 0)
#define OC_EACH_RULE(DO)                                                                                               \
    OC_EACH_ELEMENTWISE_RULE(DO)                                                                                       \
    DO(OC_MUON_DIRECTION, muon, 1, OC_ALWAYS, 1)                                                                       \
    DO(OC_MUON, muon, 2, OC_ALWAYS, 3)

enum { OC_ALWAYS = -1 };

#define OC_COUNT_CASE(RULE, NAME, COUNT, WHICH, SIGNS)                                                                 \
    case RULE: return COUNT;
#define OC_WHICH_CASE(RULE, NAME, COUNT, WHICH, SIGNS)                                                                 \
    case RULE: return WHICH;
#define OC_SIGN_CASE(RULE, NAME, COUNT, WHICH, SIGNS)                                                                  \
    case RULE: return (SIGNS) >> moment & 1;

/* The most moments that a rule has. */
OC_FUNCTION int oc_moments(int rule) {
    switch (rule) { OC_EACH_RULE(OC_COUNT_CASE) }
    return 0;
}

OC_FUNCTION int oc_moments_depend_on(int rule) {
    switch (rule) { OC_EACH_RULE(OC_WHICH_CASE) }
    return OC_ALWAYS;
}

/* Its moments with these oc_scalars.values. A subnormal one is 0 to some threads, so it is 0 to all. */
OC_FUNCTION int oc_kept_moments(int rule, const double *values) {
    const int which = oc_moments_depend_on(rule);
    return which == OC_ALWAYS || values[which] >= 0x1p-1022 ? oc_moments(rule) : 0;
}

OC_FUNCTION int oc_has_sign(int rule, int moment) {
    switch (rule) { OC_EACH_RULE(OC_SIGN_CASE) }
    return 0;
}

#endif
