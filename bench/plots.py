def pyplot():
    import matplotlib

    matplotlib.use("svg")
    from matplotlib import pyplot

    return pyplot
