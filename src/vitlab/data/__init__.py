"""Data: images in, batches out (Sec. 4.1).

`registry.py` names the data sets and reads them, `dataset.py` has their type. They come from folders
(`folder.py`), tables of files and labels (`table.py`), ImageNet's layouts (`imagenet.py`), tars (`shards.py`; on a
server `remote.py`), the Hugging Face hub (`hub.py`) and the files of published sets (`vtab/`). `decode.py` reads
images, `transforms.py` crops and resizes them (`resize.py`), `loader.py` puts them in order.
"""
