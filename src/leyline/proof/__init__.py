"""What a splice costs: beside other engines, as contexts grow, and on paper for a large GPU.

`python -m leyline.proof peers|growth|model` measures and writes JSON, a Markdown page and a
picture; both are made from the JSON alone (`python -m leyline.proof page FILE.json`).
"""
