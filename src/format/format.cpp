// placeholder replaced by the first format source
