// quant
